# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge` against a recorded Grid Engine: shown, made, made once, and removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.node_part import add_settings
from gpulock.install.sge.host_report import REPORTED
from gpulock.install.sge.install import RESTART, SgePlanner, plan_sge
from gpulock.install.sge.kinds import offered_complexes, plain_amount, plan_kind_amounts
from gpulock.install.sge.texts import complex_fault, login_script_text
from gpulock.install.sge.uninstall import FREE_FIRST, SgeUninstaller
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import parse_settings
from gpulock.node.settings_file import read_settings
from gpulock.sge.complexes import count_complex
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import Site, ignore, make_site, tree

pytestmark = pytest.mark.slow

OBJECTS = ("sq", "sc", "se", "sconf", "sconf-node1")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return make_site(tmp_path, monkeypatch)


def values(text: str) -> dict[str, str]:
    """Return the objects of qconf without the blanks between their columns."""
    lines = [
        line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line[:1] != "#"
    ]
    return {line[0]: " ".join(" ".join(line[1:]).split()) for line in lines if line}


def test_a_plan_changes_nothing(site: Site) -> None:
    before = tree(site.root)

    plan = plan_sge(site.options())

    assert [change.what for change in plan.changes] == [
        f"file {site.config}",
        f"hooks {site.root}/libexec/current",
        f"file {site.root}/profile.d/gpulock.sh",
        f"file {site.root}/profile.d/gpulock.csh",
        "complexes gpu.free gpu.quarantined",
        "shepherd_cmd in the configuration of host node1",
        "load_sensor in the configuration of host node1",
        "epilog of queue gpu.q@node1",
        "prolog of queue gpu.q@node1",
    ]
    assert tree(site.root) == before


def test_what_is_installed_is_there_and_a_second_run_has_nothing_to_do(site: Site) -> None:
    plan_sge(site.options()).apply(ignore)

    current = site.root / "libexec/current"
    assert (
        f"{current}/prolog/drop-env {current}/prolog/sge $job_id $ja_task_id $queue]"
        in site.show("sq")
    )
    assert f"load_sensor {current}/prolog/sge-sensor" in site.show("sconf-node1")
    assert "gpu.quarantined gpu.quarantined INT <= YES NO 0 0" in site.show("sc")
    assert f"SGE_ROOT={site.root}/root\n" in site.config.read_text()
    assert (current / "prolog/sge").is_file()
    assert f"'{site.root}/spool/node1'" in (site.root / "profile.d/gpulock.sh").read_text()
    assert plan_sge(site.options()).changes == []


RELEASES = (
    *("SGE 8.1.9", "SGE r273.05d828f", "SGE r273.8.1.9-272-g05d828f.dirty", "SGE r."),
    *("OCS 9.0.13", "OCS 9.1.5", "OCS 9.2.0alpha1"),
)
UNKNOWN = ("SGE 6.2u5", "UGE 8.6.18", "AGE 2024.1.0", "GCS 9.1.5", "OCS 9.3.0", "SGE 8.1.90", "")


def let_root_run_hooks(site: Site) -> None:
    """Set what the installer of Open Cluster Scheduler sets."""
    for name in ("min_uid", "min_gid"):
        line = next(one for one in site.show("sconf").splitlines() if one.startswith(name))
        site.edit("sconf", line, f"{name} 0")


def test_where_no_hook_of_roots_starts_nothing_is_installed(site: Site) -> None:
    """8.1.9 starts it below min_gid; Open Cluster Scheduler puts every queue in error."""
    site.edit("release", "SGE 8.1.9", "OCS 9.1.5")
    with pytest.raises(InstallError, match="min_gid=1000"):
        plan_sge(site.options())
    let_root_run_hooks(site)
    assert plan_sge(site.options()).changes


@pytest.mark.parametrize("release", RELEASES)
def test_a_known_grid_engine_is_installed_on(site: Site, release: str) -> None:
    site.edit("release", "SGE 8.1.9", release)
    if release.startswith("OCS"):
        let_root_run_hooks(site)

    assert plan_sge(site.options()).changes


@pytest.mark.parametrize("release", UNKNOWN)
def test_an_unknown_grid_engine_is_refused_with_its_version(site: Site, release: str) -> None:
    site.edit("release", "SGE 8.1.9", release)
    before = tree(site.root)

    with pytest.raises(InstallError, match=f"this Grid Engine is {release or 'usage'}"):
        plan_sge(site.options())

    assert tree(site.root) == before


def test_without_a_queue_it_says_how_one_is_made(site: Site) -> None:
    """qselect fails without a word then."""
    (site.state / "sq").unlink()
    before = tree(site.root)
    with pytest.raises(InstallError, match=r"no queue gpu\.q \(there is: none\).*qconf -aq gpu\.q"):
        plan_sge(site.options())
    assert tree(site.root) == before


def test_a_queue_that_is_not_there_or_not_on_this_host_is_told(site: Site) -> None:
    with pytest.raises(InstallError, match=r"no queue x\.q \(there is: gpu\.q\)"):
        plan_sge(site.options(queues=("gpu.q", "x.q")))
    line = next(one for one in site.show("sq").splitlines() if one.startswith("hostlist"))
    site.edit("sq", line, "hostlist NONE")
    with pytest.raises(InstallError, match=r"-aattr queue hostlist node1 gpu\.q"):
        plan_sge(site.options())


def test_the_shepherd_beside_execd_is_the_one_that_ours_becomes(site: Site) -> None:
    plan_sge(site.options()).apply(ignore)

    launcher = (site.root / "libexec/current/prolog/sge_shepherd").read_text()
    assert f"SHEPHERD={site.root}/sge/sge_shepherd\n" in launcher
    assert f"SGE_SHEPHERD={site.root}/sge/sge_shepherd\n" in site.config.read_text()


def test_without_execd_the_shepherd_is_below_sge_root(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulock.install.sge.site.find_execds", list)
    folder = site.root / "root/bin/lx-arm64"
    folder.parent.mkdir()
    folder.symlink_to(site.root / "sge")
    options = site.options(sge_root=str(site.root / "root"), profile=site.root / "none")

    plan_sge(options).apply(ignore)

    assert f"SGE_SHEPHERD={site.root}/sge/sge_shepherd\n" in site.config.read_text()


def no_shepherd(shepherd: Path) -> None:
    shepherd.unlink()


def broken_shepherd(shepherd: Path) -> None:
    shepherd.write_text("#!/bin/sh\necho error while loading shared libraries >&2\nexit 127\n")


def foreign_shepherd(shepherd: Path) -> None:
    shepherd.write_bytes(b"\x7fELF\2\1\1x")


def other_shepherd(shepherd: Path) -> None:
    shepherd.write_text("#!/bin/sh\necho OCS 9.1.5\n")


def writable_shepherd(shepherd: Path) -> None:
    shepherd.chmod(0o777)


def given_shepherd(shepherd: Path) -> None:
    config = shepherd.parents[1] / "etc/gpulock.conf"
    config.write_text(config.read_text() + "SGE_SHEPHERD=/nowhere/sge_shepherd\n")


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (no_shepherd, "no sge_shepherd beside execd.*set SGE_SHEPHERD"),
        (broken_shepherd, "ends with 127: error while loading shared libraries"),
        (foreign_shepherd, "cannot be run: .*Exec format error"),
        (other_shepherd, "is of OCS 9.1.5, the clients are of SGE 8.1.9"),
        (writable_shepherd, "writable by others"),
        (given_shepherd, "SGE_SHEPHERD=/nowhere/sge_shepherd is no program"),
    ],
)
def test_no_shepherd_is_put_in_force_that_would_start_no_job(
    site: Site, plant: Callable[[Path], None], says: str
) -> None:
    """Every job vanished with 127, and doctor found nothing."""
    plant(site.root / "sge/sge_shepherd")
    before = tree(site.state)

    with pytest.raises(InstallError, match=says):
        plan_sge(site.options())

    assert tree(site.state) == before


def test_uninstall_takes_out_what_leads_to_gpulock_and_names_what_stays(site: Site) -> None:
    before = {name: values(site.show(name)) for name in OBJECTS}
    plan_sge(site.options()).apply(ignore)
    settings, said = site.config.read_text(), list[str]()

    assert SgeUninstaller(site.config, said.append).uninstall() == []

    after = {name: values(site.show(name)) for name in OBJECTS}
    for name in ("sq", "se", "sconf", "sconf-node1"):
        assert after[name] == before[name], name
    assert {*after["sc"]} - {*before["sc"]} == {*REPORTED}, "others may use them by now"
    assert said[-3:] == [
        "stays: qconf -dattr exechost complex_values gpu node1",
        f"stay for other hosts: qconf -mc, complexes gpu {' '.join(REPORTED)}",
        f"{site.config}, locks and history stay",
    ]
    assert site.config.read_text() == settings
    assert not (site.root / "libexec").exists()
    assert not [*(site.root / "profile.d").iterdir()]
    assert SgeUninstaller(site.config, ignore).uninstall() == []


def test_hooks_of_another_version_or_damaged_ones_go_as_well(site: Site) -> None:
    """A newer package's stayed, and the next run said that there was nothing to do."""
    plan_sge(site.options()).apply(ignore)
    current = site.root / "libexec/current"
    newer = current.resolve().with_name("99.0-0123456789ab")
    current.resolve().rename(newer)
    current.unlink()
    current.symlink_to(newer.name)
    (newer / "prolog/sge").write_text("damaged")

    assert SgeUninstaller(site.config, ignore).uninstall() == []

    assert not (site.root / "libexec").exists()


def test_nothing_is_put_back_over_what_the_site_has_set_since(site: Site) -> None:
    """The site's new prolog was set to NONE, by what was there before the first installation."""
    plan_sge(site.options()).apply(ignore)
    own = f"[node1={site.hook('prolog')}]"
    site.edit("sq", own, "[node1=/site/new $job_id]")
    plan_sge(site.options()).apply(ignore)
    current = site.root / "libexec/current"
    ours = f"root@{current}/prolog/drop-env {current}/prolog/sge"
    assert f"[node1={ours} $job_id $ja_task_id $queue $job_owner /site/new $job_id]" in site.show(
        "sq"
    )

    for _ in range(2):
        left = SgeUninstaller(site.config, ignore).uninstall()
        assert left == [
            "qconf -rattr queue prolog '/site/new $job_id' gpu.q@node1",
            FREE_FIRST,
            "qconf -rattr queue epilog NONE gpu.q@node1",
        ]
        assert site.hook("epilog") in site.show("sq"), "a job that has claimed has none to free it"
        assert (current / "prolog/sge").is_file()

    site.set_attribute("prolog", "/site/new $job_id")
    assert SgeUninstaller(site.config, ignore).uninstall() == []
    assert "[node1=/site/new $job_id]" in site.show("sq")
    assert not (site.root / "libexec").exists()


def test_a_hook_of_the_queue_that_ours_runs_as_well_is_in_force_again(site: Site) -> None:
    """By taking our line away: what the queue says now runs here, whatever it said before."""
    site.edit("sq", "prolog                NONE", "prolog  /site/pro $job_id")
    plan_sge(site.options()).apply(ignore)

    assert SgeUninstaller(site.config, ignore).uninstall() == []

    assert "[node1=" not in site.show("sq")
    assert values(site.show("sq"))["prolog"] == "/site/pro $job_id"


def test_where_the_queue_has_another_hook_by_now_a_person_decides(site: Site) -> None:
    plan_sge(site.options()).apply(ignore)
    site.edit("sq", "prolog                NONE", "prolog                /site/later")

    left = SgeUninstaller(site.config, ignore).uninstall()

    assert left[0] == "qconf -rattr queue prolog NONE gpu.q@node1"
    assert site.hook("prolog") in site.show("sq")


def test_the_line_of_all_hosts_is_left_to_a_person(site: Site) -> None:
    plan_sge(site.options(all_hosts=True)).apply(ignore)

    left = SgeUninstaller(site.config, ignore).uninstall()

    prolog, epilog = (f"qconf -rattr queue {hook} NONE gpu.q" for hook in ("prolog", "epilog"))
    assert left == [prolog, FREE_FIRST, epilog]
    assert (site.root / "libexec/current/prolog/sge").is_file()


def test_the_epilog_stays_while_a_job_holds_a_device(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that started between the look at the locks and the end of our prolog."""
    plan_sge(site.options()).apply(ignore)
    take_out = SgeUninstaller.take_out_hook

    def and_claim(self: SgeUninstaller, hook: str) -> list[str]:
        (site.root / "node/run/gpulock/locks/0000:06:00.0").mkdir(parents=True, exist_ok=True)
        return take_out(self, hook)

    with monkeypatch.context() as patch:
        patch.setattr(SgeUninstaller, "take_out_hook", and_claim)
        left = SgeUninstaller(site.config, ignore).uninstall()
    assert left == ["the epilog stays while 1 devices are locked"]
    assert (site.hook("prolog") in site.show("sq"), site.hook("epilog") in site.show("sq")) == (
        False,
        True,
    )

    (site.root / "node/run/gpulock/locks/0000:06:00.0").rmdir()
    assert SgeUninstaller(site.config, ignore).uninstall() == []


def test_an_edit_of_the_hosts_configuration_stays(site: Site) -> None:
    site.edit("sconf", "load_sensor                  none", "load_sensor  /site/sensor")
    plan_sge(site.options()).apply(ignore)
    ours = f"{site.root}/libexec/current/prolog/sge-sensor"
    site.edit("sconf-node1", f"/site/sensor,{ours}", f"/site/other,{ours},/site/third")
    (site.state / "sconf-node1").write_text(f"{site.show('sconf-node1')}reporting_params x\n")
    before = values(site.show("sconf-node1"))

    assert SgeUninstaller(site.config, ignore).uninstall() == []

    after = values(site.show("sconf-node1"))
    del before["shepherd_cmd"]
    assert after == {**before, "load_sensor": "/site/other,/site/third"}


def quick_reports(site: Site) -> None:
    """Let nobody wait for long."""
    line = next(one for one in site.show("sconf").splitlines() if one.startswith("load_report"))
    site.edit("sconf", line, "load_report_time 00:00:00")


def test_an_execd_without_a_configuration_of_its_own_takes_the_new_one(site: Site) -> None:
    """It asked for it only when a version that it knew was another: no sensor ever started."""
    (site.state / "sconf-node1").unlink()
    before = values(site.show("sconf"))
    said: list[str] = []

    def echo(line: str) -> None:
        said.append(line)
        if line.startswith("the host had none"):
            site.restart_execd()

    plan_sge(site.options()).apply(echo)

    assert "gpu.free=8" in site.show("se")
    assert "waiting for execd of node1 to take its configuration" in said
    assert f"the host had none of its own: {RESTART}" in said
    assert values(site.show("sconf")) == before
    assert SgeUninstaller(site.config, ignore).uninstall() == []
    assert not (site.state / "sconf-node1").exists()
    assert values(site.show("sconf")) == before


def test_no_queue_is_changed_before_execd_starts_our_shepherd(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_reports(site)
    (site.state / "deaf").touch()

    with monkeypatch.context() as patch:
        patch.setattr("gpulock.install.sge.host_report._SLACK_SECONDS", 0.0)
        with pytest.raises(InstallError, match="no queue was changed"):
            plan_sge(site.options()).apply(ignore)
    assert "libexec/current" not in site.show("sq")

    (site.state / "deaf").unlink()
    plan_sge(site.options()).apply(ignore)
    assert "libexec/current" in site.show("sq")


def killed(echo: str) -> None:
    """Be killed after the first line of the host's configuration."""
    if echo.startswith("done: ") and echo.endswith("in the configuration of host node1"):
        raise KeyboardInterrupt


def test_a_killed_installation_takes_no_earlier_sensor_for_a_proof(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between load_sensor and shepherd_cmd and tried again, it saw the sensor report."""
    monkeypatch.setattr("gpulock.install.sge.host_report._SLACK_SECONDS", 0.0)
    quick_reports(site)
    with pytest.raises(KeyboardInterrupt):
        plan_sge(site.options()).apply(killed)
    (site.state / "deaf").touch()

    with pytest.raises(InstallError, match="no queue was changed"):
        plan_sge(site.options()).apply(ignore)
    assert "libexec/current" not in site.show("sq")


def test_a_sensor_that_reports_since_before_proves_no_shepherd_cmd(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_reports(site)
    sensor = f"load_sensor {site.root}/libexec/current/prolog/sge-sensor\n"
    (site.state / "sconf-node1").write_text(f"{site.show('sconf-node1')}{sensor}")
    site.edit("se", "load_values           ", "load_values           gpu.free=8,")
    (site.state / "deaf").touch()

    with monkeypatch.context() as patch:
        patch.setattr("gpulock.install.sge.host_report._SLACK_SECONDS", 0.0)
        for _ in range(2):  # the second has its shepherd_cmd from the first
            with pytest.raises(InstallError, match=r"sends no new report.*no queue was changed"):
                plan_sge(site.options()).apply(ignore)
            assert "libexec/current" not in site.show("sq")

    (site.state / "deaf").unlink()
    said: list[str] = []
    plan_sge(site.options()).apply(said.append)
    assert "waiting for execd of node1 to take its configuration" in said
    assert "libexec/current" in site.show("sq")


def test_the_hooks_stay_while_the_sensor_runs_however_often_they_are_uninstalled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run no longer knew of the sensor, and took the program away under it."""
    quick_reports(site)
    plan_sge(site.options()).apply(ignore)
    (site.state / "deaf").touch()

    with monkeypatch.context() as patch:
        patch.setattr("gpulock.install.sge.host_report._SLACK_SECONDS", 0.0)
        for _ in range(2):
            left = SgeUninstaller(site.config, ignore).uninstall()
            assert any("still runs the load sensor" in line for line in left)
            assert (site.root / "libexec/current/prolog/sge-sensor").is_file()

    (site.state / "deaf").unlink()
    assert SgeUninstaller(site.config, ignore).uninstall() == []
    assert not (site.root / "libexec").exists()


def test_the_hooks_stay_until_execd_has_taken_its_configuration_without_a_sensor(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sensor that never reported was taken for one that was stopped.

    execd then looked for a shepherd that was gone, and the queue went into error.
    """
    quick_reports(site)
    plan_sge(site.options()).apply(ignore)
    site.edit("se", "gpu.free=8", "other=1")
    (site.state / "deaf").touch()

    with monkeypatch.context() as patch:
        patch.setattr("gpulock.install.sge.host_report._SLACK_SECONDS", 0.0)
        left = SgeUninstaller(site.config, ignore).uninstall()

    assert left == ["execd of node1 sends no report: restart it"]
    assert (site.root / "libexec/current/prolog/sge_shepherd").is_file()
    (site.state / "deaf").unlink()
    said: list[str] = []
    assert SgeUninstaller(site.config, said.append).uninstall() == []
    assert "waiting for execd of node1 to take its configuration" in said
    assert not (site.root / "libexec").exists()


@pytest.mark.parametrize("user", ["sgeadmin", "none"])
def test_a_site_whose_queues_any_qrsh_would_stop_is_refused(site: Site, user: str) -> None:
    (site.root / "root/default/common/bootstrap").write_text(f"admin_user {user}\n")
    site.edit("sconf", "shepherd_cmd                 none", "shepherd_cmd  /site/wrapper")

    if user == "none":
        assert plan_sge(site.options()).changes
        return
    with pytest.raises(InstallError, match=r"puts its queue in error.*--accept-terminal-jobs"):
        plan_sge(site.options())
    plan = plan_sge(site.options(accept_terminal_jobs=True))
    assert any("puts its queue in error" in note for note in plan.notes)


def test_all_hosts_get_no_hooks_while_terminals_would_stop_one_of_them(site: Site) -> None:
    """This host alone was looked at: on others each qrsh on a terminal put the queue in error."""
    other = site.state / "sconf-node2"
    other.write_text("#node2:\ngid_range 8288200-8288299\n")

    with pytest.raises(InstallError, match=r"on node2 .*in error; run gpulock install sge there"):
        plan_sge(site.options(all_hosts=True))
    plan = plan_sge(site.options(all_hosts=True, accept_terminal_jobs=True))
    assert any("on node2 admin_user is sgeadmin" in note for note in plan.notes)

    other.write_text(f"{other.read_text()}shepherd_cmd /opt/x/current/prolog/sge_shepherd\n")
    plan = plan_sge(site.options(all_hosts=True))
    assert "prolog of queue gpu.q" in [change.what for change in plan.changes]


def test_what_an_administrator_changed_since_is_left_alone(site: Site) -> None:
    plan_sge(site.options()).apply(ignore)
    site.edit("sq", "prolog/sge $job_id", "prolog/sge mine $job_id")

    left = SgeUninstaller(site.config, ignore).uninstall()

    assert left[0] == "qconf -rattr queue prolog NONE gpu.q@node1"
    assert "prolog/sge mine $job_id" in site.show("sq")
    assert (site.root / "libexec/current/prolog/sge").is_file()


def test_uninstall_refuses_while_a_device_is_locked(site: Site) -> None:
    plan_sge(site.options()).apply(ignore)
    lock = site.root / "node/run/gpulock/locks/0000:06:00.0"
    lock.mkdir(parents=True)

    with pytest.raises(InstallError, match=r"1 devices are locked.*gpulock reap frees"):
        SgeUninstaller(site.config, ignore).uninstall()
    with pytest.raises(InstallError, match="--force --reason"):
        SgeUninstaller(site.config, ignore).uninstall(force=True)

    assert "libexec/current" in site.show("sq")


def test_the_global_epilog_and_the_queues_prolog_go_on_running(site: Site) -> None:
    site.edit("sconf", "epilog                       none", "epilog  sgeadmin@/site/epi $queue")
    site.edit("sq", "prolog                NONE", "prolog  /site/pro $job_id")

    plan_sge(site.options()).apply(ignore)

    current = site.root / "libexec/current"
    start = f"root@{current}/prolog/drop-env {current}"
    words = "$job_id $ja_task_id $queue $job_owner"
    assert f"[node1={start}/prolog/sge {words} /site/pro $job_id]" in site.show("sq")
    assert f"[node1={start}/epilog/sge {words} sgeadmin@/site/epi $queue]" in site.show("sq")
    assert plan_sge(site.options()).changes == []


def test_the_load_sensors_of_all_hosts_go_on_running(site: Site) -> None:
    site.edit("sconf", "load_sensor                  none", "load_sensor  /site/sensor")

    plan_sge(site.options()).apply(ignore)

    ours = f"{site.root}/libexec/current/prolog/sge-sensor"
    assert values(site.show("sconf-node1"))["load_sensor"] == f"/site/sensor,{ours}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("gpu gpu INT <= YES YES 1 0", "its default is 1"),
        ("gpu gpu DOUBLE <= YES YES 0 0", "its type is DOUBLE"),
        ("gpu gpu INT <= YES NO 0 0", "consumable is NO"),
        ("gpu gpu INT <= NO YES 0 0", "no job can request it"),
    ],
)
def test_a_complex_that_no_hook_can_serve_is_a_fault(line: str, says: str) -> None:
    assert says in complex_fault(line)


def test_a_complex_with_a_default_is_refused(site: Site) -> None:
    lines = site.show("sc").splitlines()
    wrong = ["gpu gpu INT <= YES YES 1 0" if row.split()[:1] == ["gpu"] else row for row in lines]
    (site.state / "sc").write_text("\n".join(wrong) + "\n")

    with pytest.raises(InstallError, match="default is 1"):
        plan_sge(site.options())


def test_a_place_changed_between_plan_and_apply_is_not_overwritten(site: Site) -> None:
    plan = plan_sge(site.options())
    site.edit("sq", "epilog                NONE", "epilog NONE,[node1=/other]")

    with pytest.raises(InstallError, match="changed meanwhile"):
        plan.apply(ignore)

    assert "[node1=/other]" in site.show("sq")


def test_a_complex_that_the_settings_do_not_name_is_refused(site: Site) -> None:
    site.config.write_text(site.config.read_text() + "SGE_COMPLEXES=gpu\n")

    with pytest.raises(InstallError, match="lacks gpuj"):
        plan_sge(site.options(complex="gpuj"))


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

    plan = plan_sge(site.options())
    plan.apply(ignore)

    assert f"complexes {' '.join(REPORTED)} gpu_v gpu_h" in [one.what for one in plan.changes]
    assert "gpu_v gpu_v INT <= YES YES 0 0" in site.show("sc")
    amounts = values(site.show("se"))["complex_values"].split(",")
    assert {"gpu=8", "gpu_v=8"} <= set(amounts)
    assert not any(amount.startswith("gpu_h") for amount in amounts), "it has none"
    assert plan_sge(site.options()).changes == []


@pytest.mark.parametrize(
    ("inner", "outer", "name"),
    [
        ("NVIDIA GeForce GTX 1080", "NVIDIA GeForce GTX 1080 Ti", "gtx-1080"),
        ("Quadro RTX 6000", "NVIDIA RTX 6000 Ada Generation", "rtx-6000"),
        ("NVIDIA H200", "NVIDIA H200 NVL", "h200"),
    ],
)
def test_of_two_models_each_complex_that_is_offered_counts_its_own(
    inner: str, outer: str, name: str
) -> None:
    found = [Device(f"0000:0{number}:00.0", number) for number in range(3)]
    for device, model in zip(found, (inner, inner, outer), strict=True):
        device.model = model
    words = offered_complexes(found, parse_settings("", "conf"))
    settings = parse_settings(f"SGE_COMPLEXES=gpu {' '.join(words)}\n", "conf")
    counts = {key: count_complex(found, settings, key) for key in settings.sge_complexes[1:]}
    assert counts[f"gpu_{name}"] == 2
    assert list(counts.values()) == [2, 1]


def test_a_node_of_several_kinds_is_offered_complexes_for_them(site: Site) -> None:
    node = write_simulated_node(site.root / "other", "a100-mig")
    settings = read_settings(str(node.config))
    found = Node(settings).devices()
    assert offered_complexes(found, settings) == [
        *("mig_3g.40gb=mig:3g.40gb", "mig_2g.20gb=mig:2g.20gb", "mig_1g.10gb=mig:1g.10gb"),
        "gpu_a100=model:a100-sxm4-80gb",
    ]
    shared = parse_settings("SHARES=6:4\nSGE_COMPLEXES=gpu gpu_a=model:a100*\n", "conf")
    assert offered_complexes(found, shared) == ["gpu_share=share"]
    assert plain_amount(settings, "gpu", 8) == 6, "two cards have instances"
    told: list[str] = []
    qconf = SgePlanner(site.options()).qconf
    assert list(plan_kind_amounts(qconf, "node1", {}, settings, told.append)) == []
    assert 'set SGE_COMPLEXES="gpu mig_3g.40gb=mig:3g.40gb ' in told[0]
