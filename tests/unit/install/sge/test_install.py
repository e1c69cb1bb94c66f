# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge` against a recorded Grid Engine: shown, made, and made once."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from gpulock.install.doctor import sge as doctor_sge
from gpulock.install.doctor.sge import SgeChecks
from gpulock.install.files import InstallError
from gpulock.install.items import Wanted
from gpulock.install.node_part import add_settings
from gpulock.install.sge import site as site_module
from gpulock.install.sge.complexes import check_complexes, host_amount
from gpulock.install.sge.host import SgeHost
from gpulock.install.sge.login import login_script_text
from gpulock.install.sge.queue_hooks import HOOKS, hook_line
from gpulock.install.sge.site import check_release
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import Site, deaf_execd, ignore, qconf_values, tree

pytestmark = pytest.mark.slow


def test_what_is_installed_is_there_and_a_second_run_has_nothing_to_do(site: Site) -> None:
    outcome = site.install_all()

    assert outcome.verdict("sge", Wanted.PRESENT, dry_run=False) == "installed: sge"
    current = site.hooks / "current"
    for hook in ("prolog", "epilog"):
        assert site.in_force(hook) == site.hook(hook)
        assert f"NONE,[@gpulock={site.hook(hook)}]" in site.show("sq")
    own = qconf_values(site.show("sconf-node1"))
    assert own["load_sensor"] == f"{current}/prolog/sge-sensor"
    assert own["shepherd_cmd"] == f"{current}/prolog/sge_shepherd"
    assert "gpu.quarantined gpu.quarantined INT <= YES NO 0 0" in site.show("sc")
    assert f"SGE_ROOT={site.root}/root\n" in site.config.read_text()
    assert (current / "prolog/sge").is_file()
    launcher = (current / "prolog/sge_shepherd").read_text()
    assert f"SHEPHERD={site.root}/sge/sge_shepherd\n" in launcher
    assert f"SGE_SHEPHERD={site.root}/sge/sge_shepherd\n" in site.config.read_text()
    assert f"'{site.root}/spool/node1'" in (site.root / "profile.d/gpulock.sh").read_text()
    for again in (site.install(), site.install_cluster()):
        assert (again.changed, again.remainders) == ([], [])


def test_a_group_that_leads_elsewhere_is_not_joined(site: Site) -> None:
    """Each job of this host would go into error for want of a hook."""
    site.install_cluster()
    for hook in HOOKS:
        line = hook_line(site.root / "other/current", hook)
        site.edit("sq", site.hook(hook), line)

    (left,) = site.install().remainders

    assert left.clause == f"no queue of node1 has the hooks of {site.hooks}/current for @gpulock"
    assert site.in_force("prolog") == "NONE"


RELEASES = (
    *("SGE 8.1.9", "SGE r273.05d828f", "SGE r273.8.1.9-272-g05d828f.dirty", "SGE r."),
    *("OCS 9.0.13", "OCS 9.1.5", "OCS 9.2.0alpha1"),
)
UNKNOWN = ("SGE 6.2u5", "UGE 8.6.18", "AGE 2024.1.0", "GCS 9.1.5", "OCS 9.3.0", "SGE 8.1.90", "")


def test_a_release_is_known_by_the_first_line_of_its_help() -> None:
    for known in RELEASES:
        check_release(known)
    for unknown in UNKNOWN:
        with pytest.raises(InstallError, match=r"this Grid Engine is .* gpulock knows Son of"):
            check_release(unknown)


@pytest.mark.parametrize("release", ["SGE 6.2u5", "", "OCS 9.1.5"])
def test_a_grid_engine_that_starts_no_hook_as_we_know_is_refused(site: Site, release: str) -> None:
    """Of Open Cluster Scheduler it is known, but below min_gid it puts every queue in error."""
    site.edit("release", "SGE 8.1.9", release)
    before, is_known = tree(site.root), release.startswith("OCS")
    says = "min_gid=1000" if is_known else f"this Grid Engine is {release or 'usage'}"

    for parts in (site.parts, *(() if is_known else (site.cluster().parts,))):
        with pytest.raises(InstallError, match=says):
            parts()

    assert tree(site.root) == before
    site.harm(r"sed -i -E 's/^(min_.id) .*/\1 0/' sge/state/sconf")
    assert not is_known or site.parts()


@pytest.mark.parametrize(
    "line",
    [
        *("gpu gpu INT <= YES YES 1 0", "gpu gpu DOUBLE <= YES YES 0 0"),
        *("gpu gpu INT <= YES NO 0 0", "gpu gpu INT <= NO YES 0 0", "gpu gpu INT == YES YES 0 0"),
    ],
)
def test_a_complex_that_no_hook_can_serve_is_refused(site: Site, line: str) -> None:
    site.harm(f"sed -i 's/^gpu .*/{line}/' sge/state/sc")

    with pytest.raises(InstallError, match=f"complex `{line}` cannot count GPUs: its type must"):
        site.parts()


def test_a_complex_of_the_sites_own_that_counts_in_another_way_is_kept() -> None:
    for line in ("gpu g RSMAP <= FORCED HOST NONE 9", "gpu g INT <= YES JOB 0 1000"):
        check_complexes({"gpu": line}, {"gpu": ""})


def test_a_queue_of_this_host_whose_jobs_get_no_locks_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SgeHost, "queues", lambda _: ["gpu.q", "all.q"])
    monkeypatch.setattr(doctor_sge, "hooked_queues", lambda _: ["gpu.q"])
    (told,) = SgeChecks(read_settings(str(site.config)), site.config).other_queues()
    assert told.what == "all.q is on this host too, and its jobs get no lock"


@pytest.mark.parametrize(
    ("user", "release", "told"),
    [("sgeadmin", "SGE 8.1.9", True), ("none", "SGE 8.1.9", False), ("sge", "OCS 9.1.5", False)],
)
def test_that_interactive_jobs_are_refused_is_said_before(
    site: Site, user: str, release: str, told: bool
) -> None:
    site.edit("release", "SGE 8.1.9", release)
    site.harm(f"sed -i 's/sgeadmin/{user}/' root/default/common/bootstrap")
    said = f"admin_user is {user}: qlogin, and qrsh without a command, are refused on these hosts"
    installer = site.cluster()
    installer.parts()
    assert (said in " ".join(installer.notes)) is told


def test_a_queue_that_is_not_there_is_told_with_how_one_is_made(site: Site) -> None:
    """qselect fails without a word then."""
    with pytest.raises(InstallError, match=r"no queue x\.q \(there is: gpu\.q\)"):
        site.cluster("gpu.q", "x.q").parts()
    (site.state / "sq").unlink()
    with pytest.raises(InstallError, match=r"no queue gpu\.q \(there is: none\).*qconf -aq gpu\.q"):
        site.cluster().parts()


@pytest.mark.parametrize(
    ("place", "hook", "old"),
    [("sq", "prolog", "prolog                NONE"), ("sconf", "epilog", "epilog  +none")],
)
def test_a_hook_that_cannot_be_kept_is_refused_before_the_cluster_is_changed(
    site: Site, place: str, hook: str, old: str
) -> None:
    """The queue's own, else the global one is what runs there now."""
    (line,) = re.findall(rf"(?m)^{old}$", site.show(place))
    site.edit(place, line, f"{hook}  /site/pro [a]")
    with pytest.raises(InstallError, match=rf"{hook} in force cannot be kept.*/site/pro \[a\]"):
        site.cluster().parts()


def test_without_execd_the_clusters_part_alone_is_installed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the master, by what qmaster was started with."""
    (execd,) = site_module.find_execds()
    monkeypatch.setattr("gpulock.install.sge.site.find_execds", list)
    with pytest.raises(InstallError, match="neither execd nor qmaster runs here"):
        site.install_cluster()
    find = {"sge_qmaster": [execd]}.get
    monkeypatch.setattr("gpulock.install.sge.site.find_scheduler_daemons", find)

    assert site.install_cluster().remainders == []
    with pytest.raises(InstallError, match="no execd runs here: start it"):
        site.install()


NO_LIBRARY = "printf '#!/bin/sh\\necho no library >&2\\nexit 127\\n' >sge/sge_shepherd"
NO_PROGRAM = "printf '\\177ELF\\2\\1\\1x' >sge/sge_shepherd"
OTHER = "printf '#!/bin/sh\\necho OCS 9.1.5\\n' >sge/sge_shepherd"
NOWHERE = "echo SGE_SHEPHERD=/nowhere/sge_shepherd >>etc/gpulock.conf"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("rm sge/sge_shepherd", r"no .*/sge/sge_shepherd, set SGE_SHEPHERD: no job would"),
        (NO_LIBRARY, "ends with 127: no library"),
        (NO_PROGRAM, "cannot be run: .*Exec format error"),
        (OTHER, "is of OCS 9.1.5, the clients are of SGE 8.1.9"),
        ("chmod 777 sge/sge_shepherd", "writable by others"),
        (NOWHERE, "SGE_SHEPHERD=/nowhere/sge_shepherd is no program"),
    ],
)
def test_no_shepherd_is_put_in_force_that_would_start_no_job(
    site: Site, harm: str, says: str
) -> None:
    """Every job vanished with 127, and doctor found nothing."""
    site.harm(harm)
    before = tree(site.state)

    with pytest.raises(InstallError, match=says):
        site.parts()

    assert tree(site.state) == before


def own_line(site: Site, line: str = "/site/own $job_id") -> str:
    site.set_attribute("prolog", line)
    return "prolog /site/own $job_id: take it out (qconf -mq gpu.q)"


def no_hook(site: Site) -> str:
    own_line(site, "NONE")
    return "prolog NONE: take it out (qconf -mq gpu.q)"


def edited_line(site: Site) -> str:
    own_line(site, f"{site.hook('prolog')} mine")
    return "mine: take it out (qconf -mq gpu.q)"


def other_group(site: Site) -> str:
    """Two groups make the value ambiguous, and the queue takes no job there."""
    (site.state / "hgrp-@other").write_text("group_name @other\nhostlist node1\n")
    site.edit("sq", "prolog                NONE", "prolog NONE,[@other=/site/pro $job_id]")
    return "prolog /site/pro $job_id: take it out (qconf -mq gpu.q)"


def own_configuration(site: Site, hook: str = "/site/here $job_id") -> str:
    own = f"{site.show('sconf-node1')}prolog {hook}\n"
    (site.state / "sconf-node1").write_text(own)
    return "prolog /site/here $job_id: take it out (qconf -mconf node1)"


@pytest.mark.parametrize("plant", [own_line, no_hook, edited_line, other_group, own_configuration])
def test_a_hook_of_this_host_alone_is_refused_with_the_call_that_edits_it(
    site: Site, plant: Callable[[Site], str]
) -> None:
    """The group's line is passed over there, and no epilog comes without its prolog."""
    says = plant(site)
    site.install_cluster()
    before = tree(site.root)

    with pytest.raises(InstallError, match=re.escape(says)):
        site.install()

    assert tree(site.root) == before


def test_a_shepherd_cmd_of_the_sites_stays_and_no_job_comes_to_the_hooks(site: Site) -> None:
    """Any job's text could run a program as root, and any qrsh on a terminal stop the queue."""
    own = f"{site.show('sconf-node1')}shepherd_cmd /site/wrapper\n"
    (site.state / "sconf-node1").write_text(own)
    site.install_cluster()

    (left,) = site.install().remainders

    assert "set SGE_SHEPHERD=/site/wrapper, then shepherd_cmd none" in left.clause
    assert "shepherd_cmd /site/wrapper\n" in site.show("sconf-node1")
    assert site.in_force("prolog") == "NONE"
    assert site.uninstall().remainders == []
    assert not site.hooks.exists()


def test_an_execd_takes_a_first_configuration_of_its_own_when_it_starts(site: Site) -> None:
    """It asked for it only when a version that it knew was another: no sensor ever started."""
    (site.state / "sconf-node1").unlink()
    site.install_cluster()
    before = qconf_values(site.show("sconf"))

    (left,) = site.install().remainders

    assert "restart it (its jobs run on), and run this again" in left.clause
    assert site.in_force("prolog") == "NONE"
    site.restart_execd()
    assert site.install().remainders == []
    assert site.in_force("prolog") == site.hook("prolog")
    assert "stays: qconf -dconf node1" in site.notes_of_removal()
    assert site.uninstall().remainders == []
    assert site.show("sconf-node1").split() == ["load_sensor", "none"]
    assert qconf_values(site.show("sconf")) == before


def test_a_sensor_that_reports_since_before_proves_no_shepherd_cmd(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = f"load_sensor {site.hooks}/current/prolog/sge-sensor\n"
    (site.state / "sconf-node1").write_text(f"{site.show('sconf-node1')}{sensor}")
    site.edit("se", "load_values           ", "load_values           gpu.free=8,")
    site.install_cluster()

    with deaf_execd(site, monkeypatch):
        for _ in range(2):  # the second has its shepherd_cmd from the first
            with pytest.raises(InstallError, match="node1 does not go by its conf"):
                site.install()
            assert site.in_force("prolog") == "NONE"

    said: list[str] = []
    site.install(said.append)
    assert "waiting for execd of node1 to take its configuration" in said
    assert site.in_force("prolog") == site.hook("prolog")


@pytest.mark.parametrize(("starts", "last"), [(0, 5), (6, 7)])
def test_execd_goes_by_a_configuration_once_two_later_reports_have_come(
    monkeypatch: pytest.MonkeyPatch, starts: int, last: int
) -> None:
    """By the first qmaster sees that it has the old one; the sensor may start later."""
    values = [{"load": str(n // 2)} | ({"gpu.free": "8"} if n >= starts else {}) for n in range(12)]
    asked = iter(values)
    host = SimpleNamespace(
        **{"_followed": False, "echo": ignore, "name": "node1"},
        effective_configuration=dict,
        values=lambda _: next(asked),
    )
    monkeypatch.setattr("gpulock.install.sge.host._PAUSE", 0.0)
    SgeHost.await_configuration(cast("SgeHost", host), sensor=True)
    assert next(asked) == values[last], "the one that it had, and two"


def test_a_hook_of_the_group_that_goes_while_execd_is_awaited_is_told(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install_cluster()

    def purge(host: SgeHost, *, sensor: bool) -> None:
        assert sensor
        host.qconf.run("qconf", "-purge", "queue", "epilog", "gpu.q@@gpulock")

    monkeypatch.setattr(SgeHost, "await_configuration", purge)
    why = r"epilog of queue gpu\.q@node1: the epilog of gpu\.q@@gpulock went meanwhile: run"
    with pytest.raises(InstallError, match=why):
        site.install()


def test_a_key_that_stands_in_the_settings_is_kept() -> None:
    text = "# mine\nEXPECTED_GPUS = 4"

    new = add_settings(text, {"EXPECTED_GPUS": "8", "SGE_CELL": "default"}, "sge")

    assert new.startswith("# mine\nEXPECTED_GPUS = 4\n#")
    assert new.endswith("\nSGE_CELL=default\n")
    assert add_settings(new, {"EXPECTED_GPUS": "8", "SGE_CELL": "x"}, "sge") == new


def test_a_spool_folder_or_group_range_that_the_shell_would_read_otherwise_is_refused() -> None:
    with pytest.raises(InstallError, match="odd name"):
        login_script_text("/spool/a'b", "1-2")
    with pytest.raises(InstallError, match="gid_range"):
        login_script_text("/spool/a", "none")


def test_complexes_of_kinds_are_made_with_the_hosts_amounts(site: Site) -> None:
    names = "gpu gpu_v=model:v100* gpu_h=model:h200"
    site.config.write_text(f"{site.config.read_text()}SGE_COMPLEXES={names}\n")

    site.install_all()

    assert "gpu_v gpu_v INT <= YES YES 0 0" in site.show("sc")
    amounts = qconf_values(site.show("se"))["complex_values"].split(",")
    assert {"gpu=8", "gpu_v=8"} <= set(amounts)
    assert not any(amount.startswith("gpu_h") for amount in amounts), "it has none"
    assert site.install().changed == []


def test_of_a_node_with_mig_the_plain_complex_counts_whole_cards(site: Site) -> None:
    node = write_simulated_node(site.root / "other", "a100-mig")

    amount = host_amount(read_settings(str(node.config)), "gpu", 8)

    assert amount == 6, "two cards have instances"
