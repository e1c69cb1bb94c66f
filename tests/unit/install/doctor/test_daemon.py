# SPDX-License-Identifier: Apache-2.0
"""Doctor says whether the services run, and whether settings can do what they say."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gpulock.daemon.core import own_program, sample
from gpulock.deadline import clock_boottime
from gpulock.install.doctor import daemon
from gpulock.install.doctor.check import FAULT, WARNING, Finding, Report, run_checks
from gpulock.install.doctor.daemon import systemd_checks
from gpulock.install.doctor.node import UNREADABLE, check_settings, node_checks
from gpulock.install.systemd import install, units
from gpulock.node.settings import parse_settings
from gpulock.node.settings_file import read_settings
from gpulock.store.verdicts import FRESH, write_verdicts
from tests.support.cli_site import Site
from tests.support.clock import VirtualClock
from tests.support.install_site import harm
from tests.support.systemd_site import SystemdNode, make_systemd_node
from tests.support.trees import BOOT, Box


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    monkeypatch.setattr(install, "BOOTED", tmp_path)
    made = Box(tmp_path)
    made.lock.mkdir(exist_ok=True)
    return made


def run(box: Box) -> Report:
    return run_checks(daemon.daemon_checks(box.node().settings))


def told(box: Box) -> list[Finding]:
    return run(box).findings


def run_daemon(box: Box) -> None:
    (box.lock / "daemon").touch()
    file = (box.lock / "daemon").stat()
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    (box.proc.root / "locks").write_text(f"1: FLOCK  ADVISORY  WRITE 77 {place} 0 EOF\n")
    box.proc.add(77)


def test_a_reap_from_cron_does_while_it_is_fresh(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    write_verdicts(str(box.lock), {}, BOOT)
    assert (told(box), run(box).facts) == ([], ["gpulock reap instead of gpulockd"])
    later = clock_boottime() + FRESH + 1
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "clock_boottime", lambda: later)
        assert [check.state for check in told(box)] == [WARNING]
    write_verdicts(str(box.lock), {}, "33333333-3333-3333-3333-333333333333")  # another boot's
    assert [check.state for check in told(box)] == [WARNING]
    monkeypatch.setattr(install, "BOOTED", box.root / "none")
    (check,) = told(box)
    assert check.do == "start gpulockd; or run gpulock reap from cron every minute"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"USER_CLAIMS": "yes"}, "USER_CLAIMS"),
        ({"SHARES": "0:4", "SHARE_MPS": "yes"}, "SHARE_MPS"),
    ],
)
def test_what_needs_it_is_a_fault_whoever_reaps(box: Box, keys: dict[str, str], says: str) -> None:
    box.settings |= keys
    for _ in range(2):
        (check,) = told(box)
        assert (check.state, check.what) == (FAULT, f"it does not run, which {says} need")
        assert check.do == "gpulock install systemd"
        write_verdicts(str(box.lock), {}, BOOT)


def test_a_daemon_that_was_stopped_or_reconciles_no_more_does_not_answer(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_daemon(box)
    write_verdicts(str(box.lock), {}, BOOT)
    assert (told(box), run(box).facts) == ([], ["gpulockd"])
    later = clock_boottime() + FRESH + 1
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "clock_boottime", lambda: later)
        (check,) = told(box)
    assert (check.state, check.what[:30]) == (FAULT, "pid 77 does not answer; it las")
    box.proc.add(77, state="T")
    (check,) = told(box)
    assert (check.state, "pid 77 does not answer" in check.what) == (FAULT, True)


# --- the exporter, and settings -----------------------------------------------------------------


@pytest.mark.parametrize(("boot", "ago", "warned"), [(BOOT, 5, 0), (BOOT, 60, 1), ("x", 60, 0)])
def test_an_exporter_that_wrote_in_this_boot_and_writes_no_more_is_a_warning(
    box: Box,
    boot: str,
    ago: float,
    warned: int,
    monkeypatch: pytest.MonkeyPatch,
    clock: VirtualClock,
) -> None:
    clock.now += ago  # the machine may have been booted just now
    monkeypatch.setattr(install, "BOOTED", box.root / "none")
    head = f"{sample.SAMPLE_LINE}\nboot_id={boot}\nboottime={clock_boottime() - ago}\n"
    (box.root / "run-exporter").mkdir()
    (box.root / "run-exporter" / "sample").write_text(head)
    found = [one for one in told(box) if one.name == "exporter"]
    assert [one.state for one in found] == [WARNING] * warned
    assert not warned or found[0].what == "down for 1m. Jobs are not affected"
    box.settings["QUARANTINE_ON"] = "missing ecc xid"
    unseen = [one.what.rpartition(". ")[2] for one in told(box) if one.name == "exporter"]
    assert unseen == ["ecc is not detected"] * (ago == 60)


def test_a_value_that_fails_no_job_is_a_fault_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "gpulock.conf"
    path.write_text("QUARANTINE_ON=hot\nWEB_CONFIG=/none/web.yml\nSHARE_MPS=yes\n")
    assert [one.state for one in check_settings(read_settings(str(path)), path)] == [FAULT] * 3
    path.write_text("QUARANTINE_ON=xid\n")
    path.chmod(0o644)
    assert [*check_settings(read_settings(str(path)), path)] == []
    path.chmod(0o640)
    (found,) = check_settings(read_settings(str(path)), path)
    assert (found.state, found.what) == (WARNING, UNREADABLE.format(path))
    path.rename(path.with_name("other"))
    assert [*check_settings(parse_settings("", str(path)), path)] == []


# --- the services that systemd runs ---------------------------------------------------------------

DAEMON = "gpulockd.service"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    made = make_systemd_node(tmp_path, monkeypatch)
    made.install()
    return made


def look(node: SystemdNode) -> list[Finding]:
    return run_checks(systemd_checks(node.config)).findings


def test_nothing_is_said_where_nothing_was_installed_or_nothing_runs(
    tmp_path: Path, node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.ctl.mark("active", DAEMON, "")
    assert look(node) == [], "the checks of both programs say so"
    with monkeypatch.context() as patch:
        patch.setattr(install, "BOOTED", node.root / "nowhere")
        assert look(node) == []
    assert look(make_systemd_node(tmp_path / "other", monkeypatch)) == []


def turned_off_with_other_settings(node: SystemdNode) -> None:
    for state in ("enabled", "active"):
        node.ctl.mark(state, DAEMON, "")
    node.set(CDI_DIR="/srv/cdi")


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (partial(SystemdNode.set, EXPORTER_LISTEN=":9999"), "-exporter.socket.d/10-gpulock.conf"),
        (lambda _: install.unit_path(DAEMON).unlink(), "lib/systemd/system/gpulockd.service"),
        (turned_off_with_other_settings, "/gpulockd.service.d/10-gpulock.conf"),
    ],
)
def test_what_is_not_as_it_would_be_installed_is_named(
    node: SystemdNode, plant: Callable[[SystemdNode], object], says: str
) -> None:
    plant(node)

    (first,) = look(node)

    assert (first.name, first.state, says in first.what) == ("services", WARNING, True), first
    assert "install systemd" in first.do


def test_a_name_to_listen_on_is_told_with_what_to_give_in_its_place(node: SystemdNode) -> None:
    node.set(EXPORTER_LISTEN="localhost:9465")
    assert "not on a name; give the address" in look(node)[0].what


def test_the_packages_units_are_compared_with_the_settings_once_one_of_them_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_systemd_node(tmp_path, monkeypatch)
    monkeypatch.setattr(own_program, "PACKAGE", own_program.library_folder())
    monkeypatch.setattr(units, "DEFAULT_PATH", str(node.config))
    node.give_package_units()
    node.ctl("systemctl", "enable", DAEMON)
    node.ctl("systemctl", "restart", DAEMON)
    assert look(node) == []
    node.set(ISOLATION="cgroup")
    node.ctl("systemctl", "disable", DAEMON)
    assert look(node) == []  # nobody starts any
    node.ctl("systemctl", "enable", DAEMON)

    (first,) = look(node)

    assert (first.name, first.state) == ("services", WARNING)
    assert first.what.endswith(f": {install.drop_in_path(DAEMON)}")
    assert first.do == "gpulock install systemd"


# --- a command that is printed mends the node when it is pasted, also where paths have blanks -----


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "GPUs of us")


def faults(site: Site) -> list[Finding]:
    report = run_checks(node_checks(read_settings(site.config)))
    return [one for one in report.findings if one.state == FAULT]


@pytest.mark.parametrize("name", ["", ".claims"])
def test_what_is_wrong_with_either_folder_is_named(site: Site, name: str) -> None:
    site.hold(1)
    folder = Path(f"{site.files.lock_dir}{name}")
    folder.chmod(0o777)
    (broken,) = faults(site)
    assert f"{folder} has uid" in broken.what and "mode 777" in broken.what


@pytest.mark.parametrize(
    "plant",
    [
        "chmod 644 {lock}.claims/gate",
        "touch {lock}/locks/{id}",
        "chmod 775 {state}",
        "touch {state}/quarantine.lost",
    ],
)
def test_the_command_for_a_fault_of_the_node_mends_it(site: Site, plant: str) -> None:
    site.hold(1)
    assert faults(site) == []
    lock, state = map(shlex.quote, (str(site.files.lock_dir), read_settings(site.config).state_dir))
    harm(Path("/"), plant.format(lock=lock, state=state, id=site.id(2)))
    (broken,) = faults(site)
    command = broken.do.rpartition("then: ")[2]
    site.shell(command.replace("gpulock reap", '"$@" reap'))
    assert faults(site) == []
