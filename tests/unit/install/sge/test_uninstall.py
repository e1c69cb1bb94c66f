# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall sge` against a recorded Grid Engine: the prolog first, the hooks last."""

from __future__ import annotations

import random
import re

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.cli.admin.items import UNFINISHED
from gpulock.install.files import InstallError
from gpulock.install.items import Wanted
from gpulock.install.sge.host import REPORTED
from tests.support.install_site import Site, deaf_execd, qconf_values, tree
from tests.support.runner import command_runner

pytestmark = pytest.mark.slow

OBJECTS = ("sq", "sc", "se", "sconf", "sconf-node1")
LOCK = "node/run/gpulock/locks/0000:06:00.0"


def test_uninstall_takes_out_what_leads_to_gpulock_and_names_what_stays(site: Site) -> None:
    before = {name: qconf_values(site.show(name)) for name in OBJECTS}
    site.install_all()
    settings = site.config.read_text()

    assert "stays: qconf -dattr exechost complex_values gpu node1" in site.notes_of_removal()
    assert "stays: qconf -dconf node1" not in site.notes_of_removal()

    outcome = site.uninstall()

    assert outcome.verdict("sge", Wanted.ABSENT, dry_run=False) == "uninstalled: sge"
    assert (site.in_force("prolog"), site.in_force("epilog")) == ("NONE", "NONE")
    assert (site.state / "hgrp-@gpulock").read_text().endswith("hostlist NONE\n")
    cluster = site.cluster()
    assert site.run(cluster.removal(), Wanted.ABSENT).remainders == []
    after = {name: qconf_values(site.show(name)) for name in OBJECTS}
    for name in ("sq", "se", "sconf", "sconf-node1"):
        assert after[name] == before[name], name
    assert {*after["sc"]} - {*before["sc"]} == {*REPORTED}, "others may use them by now"
    assert cluster.notes == [
        f"complexes stay, for the site's jobs may name them: gpu {' '.join(REPORTED)}"
    ]
    assert site.config.read_text() == settings
    assert not site.hooks.exists()
    assert not [*(site.root / "profile.d").iterdir()]
    assert not (site.root / "node/state/sge-map").exists()
    assert site.uninstall().changed == []


def test_a_host_is_taken_out_with_hooks_of_any_version_damaged_or_not(site: Site) -> None:
    """A newer package's stayed, and the next run said that there was nothing to do."""
    site.install_all()
    current = site.hooks / "current"
    newer = current.resolve().with_name("99.0-0123456789ab")
    current.resolve().rename(newer)
    current.unlink()
    current.symlink_to(newer.name)
    (newer / "prolog/sge").write_text("damaged")

    assert site.uninstall().remainders == []

    assert (site.in_force("prolog"), site.in_force("epilog")) == ("NONE", "NONE")
    assert not site.hooks.exists()


def test_a_group_of_that_name_with_a_line_of_the_sites_is_left_to_a_person(site: Site) -> None:
    (site.state / "hgrp-@gpulock").write_text("group_name @gpulock\nhostlist NONE\n")
    site.edit("sq", "prolog                NONE", "prolog NONE,[@gpulock=/site/group $job_id]")

    for run in (site.install_cluster, lambda: site.run(site.cluster().removal(), Wanted.ABSENT)):
        with pytest.raises(InstallError, match=r"qconf -purge queue prolog gpu\.q@@gpulock"):
            run()

    assert "[@gpulock=/site/group $job_id]" in site.show("sq")


def test_lines_of_the_sites_that_lead_to_the_hooks_keep_them(site: Site) -> None:
    site.install_all()
    site.set_attribute("prolog", f"{site.hook('prolog')} mine")
    current = site.hooks / "current"
    (line,) = (one for one in site.show("sconf").splitlines() if one.startswith("rlogin_command"))
    site.edit("sconf", line, f"rlogin_command {current}/prolog/mine")
    site.edit("sq", "starter_method        NONE", f"starter_method {current}/prolog/sge-starter")

    for _ in range(2):
        (left,) = site.uninstall().remainders
        assert left.page == [
            f"qconf -mq gpu.q: prolog of gpu.q@node1 is {site.hook('prolog')} mine",
            f"qconf -mq gpu.q: starter_method of gpu.q@node1 is {current}/prolog/sge-starter",
            f"qconf -mconf: rlogin_command is {current}/prolog/mine",
        ]
        assert (current / "prolog/sge").is_file()
        assert site.in_force("epilog") == site.hook("epilog")

    site.set_attribute("prolog", "NONE")
    site.edit("sq", f"starter_method {current}/prolog/sge-starter", "starter_method NONE")
    site.edit("sconf", f"{current}/prolog/mine", "builtin")
    assert site.uninstall().remainders == []
    assert not current.exists()


def test_a_line_of_the_group_that_the_host_has_of_its_own_keeps_the_hooks(site: Site) -> None:
    """The queue would start it after the host has left the group."""
    site.install_all()
    line = site.hook("prolog")
    site.set_attribute("prolog", line)

    (left,) = site.uninstall().remainders

    assert [*left.page] == [f"qconf -mq gpu.q: prolog of gpu.q@node1 is {line}"]
    assert site.hooks.exists()


def test_what_a_job_needs_stays_while_it_holds_a_device(site: Site) -> None:
    """The prolog goes at once; the epilog, sensor and shepherd stay, and a second run completes."""
    site.install_all()
    (site.root / LOCK).mkdir(parents=True)

    (left,) = site.uninstall().remainders

    assert left.clause.startswith("Grid Engine's jobs hold 1 devices (0000:06:00.0): gpulock reap")
    assert (site.in_force("prolog"), site.in_force("epilog")) == ("NONE", site.hook("epilog"))
    assert "shepherd_cmd" in site.show("sconf-node1")
    assert (site.hooks / "current/epilog/sge").is_file()

    (site.root / LOCK).rmdir()
    assert site.uninstall().remainders == []
    assert not site.hooks.exists()


def test_a_queue_without_hooks_of_ours_is_left_alone(site: Site) -> None:
    """The host is in the group for another queue's."""
    site.install_all()
    for hook in ("prolog", "epilog"):
        site.edit("sq", f",[@gpulock={site.hook(hook)}]", "")

    for done in (site.install(), site.uninstall()):
        assert not [title for title in done.changed if "queue gpu.q" in title]


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        *((one, one) for one in ("", "load_sensor none\n", "load_sensor /site/own\n")),
        ("load_sensor /old/prolog/sge-sensor,/site/own\n", "load_sensor /site/own\n"),
    ],
)
def test_the_sensor_of_before_runs_again_the_hosts_own_or_the_global_one(
    site: Site, own: str, kept: str
) -> None:
    """That of another gpulock goes."""
    site.edit("sconf", "load_sensor                  none", "load_sensor  /site/sensor")
    (site.state / "sconf-node1").write_text(f"mailer /bin/mail\n{own}")

    site.install_all()
    site.uninstall()

    assert qconf_values(site.show("sconf-node1")) == qconf_values(f"mailer /bin/mail\n{kept}")


@pytest.mark.parametrize("reports", [True, False])
def test_the_hooks_stay_until_execd_has_let_go_of_them_however_often_they_are_uninstalled(
    site: Site, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    """A second run no longer knew of the sensor, and took the program away under it.

    One that never reported was taken for one that was stopped; execd then looked for a shepherd
    that was gone, and the queue went into error.
    """
    site.install_all()
    if not reports:
        site.edit("se", "gpu.free=8", "slots=8")

    why = "does not go by its configuration"
    with deaf_execd(site, monkeypatch):
        for _ in range(2):
            with pytest.raises(InstallError, match=rf"hooks .*current: execd of node1 {why}"):
                site.uninstall()
            assert (site.hooks / "current/prolog/sge-sensor").is_file()

    assert site.uninstall().remainders == []
    assert not site.hooks.exists()


def test_hooks_that_slurm_uses_as_well_stay(site: Site) -> None:
    site.install_all()
    (site.root / "node/state/slurm-map").write_text(f"gpulock-slurm-map 1\nhooks={site.hooks}\n")

    assert site.uninstall().remainders == []

    assert (site.hooks / "current/prolog/sge").is_file()
    assert (site.in_force("prolog"), (site.root / "node/state/sge-map").exists()) == ("NONE", False)


# --- the commands, as an administrator types them -------------------------------------------------

CLUSTER = ("--cluster", "--queue", "gpu.q")


def call(site: Site, *args: str) -> Result:
    return command_runner().invoke(command_group, ["--config", str(site.config), *args])


def install(site: Site, *args: str) -> Result:
    return call(site, "install", "sge", *args)


def test_what_belongs_to_the_cluster_is_not_taken_for_the_nodes(site: Site) -> None:
    assert install(site, "--queue", "gpu.q").exit_code == 2
    assert install(site, "--cluster").exit_code == 2
    assert call(site, "uninstall", "slurm", "--cluster").exit_code == 2


def test_the_verdict_says_whether_it_is_in_force(site: Site) -> None:
    before = tree(site.state)
    alone = install(site)
    assert alone.exit_code == UNFINISHED
    left = "there is no complex gpu.free gpu.quarantined; no queue of node1 has the hooks of "
    assert f"\ninstalled, NOT in force: {left}" in alone.stdout
    assert (tree(site.state), (site.hooks / "current/prolog/sge").is_file()) == (before, True)
    assert "once, by a manager: gpulock --config" in alone.stdout

    cluster = install(site, *CLUSTER)
    assert (cluster.exit_code, "\ninstalled: sge --cluster\n" in cluster.stdout) == (0, True)
    assert "gpulockd does not run" not in cluster.stdout, "it is no node's"
    whole = install(site)
    assert (whole.exit_code, "\ninstalled: sge\n" in whole.stdout) == (0, True)
    trial = "qsub -q gpu.q@node1 -l gpu=1 -b y -j y /usr/bin/printenv CUDA_VISIBLE_DEVICES"
    assert f"as an ordinary user: {trial}" in " ".join(whole.stdout.split())
    assert "nothing to change: sge is in force\n" in install(site).stdout


def test_both_ways_are_shown_and_the_cluster_goes_last(site: Site) -> None:
    install(site, *CLUSTER)
    install(site)
    shown = call(site, "uninstall", "sge", "--dry-run")
    assert (shown.exit_code, "  - node1 in @gpulock\n" in shown.stdout) == (0, True)
    assert f"  - shepherd_cmd {site.hooks}/current/prolog/sge_shepherd\n" in shown.stdout
    early = call(site, "uninstall", "sge", "--cluster")
    assert (early.exit_code, "hosts are in @gpulock: node1" in early.stdout) == (UNFINISHED, True)
    assert site.in_force("prolog") == site.hook("prolog")

    done = call(site, "uninstall", "sge")

    assert done.exit_code == 0
    said = ["uninstalled: sge", f"{site.config}, locks and history stay"]
    assert done.stdout.splitlines()[-2:] == said
    last = call(site, "uninstall", "sge", "--cluster")
    assert (last.exit_code, last.stdout.splitlines()[-1]) == (0, "uninstalled: sge --cluster")
    assert call(site, "uninstall", "sge").stdout.startswith("nothing to do: sge")


# --- whatever is installed, edited and uninstalled, in any order: what is the site's stays --------

Objects = dict[str, dict[str, str]]


def site_values(site: Site) -> Objects:
    """Return what Grid Engine's objects have, without what is gpulock's."""
    ours = re.escape(str(site.hooks))
    objects = {name: qconf_values(site.show(name)) for name in OBJECTS}
    for hook in ("prolog", "epilog"):
        objects["sq"][hook] = re.sub(rf",?\[@gpulock=root@{ours}[^]]*\]", "", objects["sq"][hook])
    for name in (*REPORTED, "gpu.free"):
        objects["sc"].pop(name, None)
    del objects["se"]["load_values"]  # execd's
    own = objects["sconf-node1"]
    own.pop("#node1:", None)
    for key in ("load_sensor", "shepherd_cmd"):
        left = [
            one for one in own.pop(key, "none").split(",") if not one.startswith(str(site.hooks))
        ]
        own |= {key: ",".join(left)} if left not in ([], ["none"]) else {}
    return objects


def edit_as_administrator(site: Site, number: int, draw: random.Random) -> None:
    """Change an object as an administrator does at any time."""
    name = draw.choice(OBJECTS)
    old, new = {
        "sq": (r"(?m)^seq_no\s.*$", f"seq_no                {number}"),
        "sc": (r"(?m)^(cpu\s.*)$", rf"\1\nlater{number} later{number} INT <= YES NO 0 0"),
        "se": (r"slots=16", f"slots=16,later{number}={number}"),
        "sconf": (r"(?m)^(login_shells\s.*)$", rf"\1,later{number}"),
        "sconf-node1": (r"(?m)^(gid_range\s.*)$", rf"\1\nlater{number} {number}"),
    }[name]
    text = site.show(name)
    assert re.search(old, text)
    (site.state / name).write_text(re.sub(old, new, text, count=1))
    with site.config.open("a") as file:
        file.write(f"# the site's {number}\n")


@pytest.mark.parametrize("seed", range(12))
def test_what_is_the_sites_stays_in_any_order_of_installations_and_edits(
    site: Site, seed: int
) -> None:
    draw = random.Random(seed)
    site.install_cluster()
    acts = (
        site.install_all,
        site.uninstall,
        lambda: site.run(site.cluster().removal(), Wanted.ABSENT),
    )
    for number in range(10):
        edit_as_administrator(site, number, draw)
        values, settings = site_values(site), site.config.read_text()
        draw.choice(acts)()
        assert site_values(site) == values
        assert site.config.read_text().startswith(settings)

    site.uninstall()
    assert site.run(site.cluster().removal(), Wanted.ABSENT).remainders == []
    assert site_values(site) == values
    assert (site.in_force("prolog"), site.in_force("epilog")) == ("NONE", "NONE")
    assert not site.hooks.exists()
