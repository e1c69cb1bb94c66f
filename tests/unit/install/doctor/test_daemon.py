# SPDX-License-Identifier: Apache-2.0
"""Doctor says whether gpulockd and the exporter run, and whether settings can do what they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.mps.unit import MpsPrograms
from gpulock.deadline import clock_boottime
from gpulock.install.doctor import daemon
from gpulock.install.doctor.check import FAULT, WARNING, Finding, Report, run_checks
from gpulock.install.doctor.node import check_mps, check_settings, node_checks
from gpulock.install.systemd import manager
from gpulock.node import sample
from gpulock.node.settings_file import read_settings
from gpulock.store.verdicts import FRESH, write_verdicts
from tests.support.trees import BOOT, Box


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    monkeypatch.setattr(manager, "RUNNING", tmp_path)
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


def test_without_a_daemon_it_is_a_warning_with_both_ways(box: Box) -> None:
    run_daemon(box)
    (box.proc.root / "locks").write_text("")  # it ended
    (check,) = told(box)
    assert check.state == WARNING
    assert check.what == "it does not run: what a hook could not free stays locked"
    assert "gpulock install systemd" in check.do and "cron" in check.do


def test_where_no_systemd_runs_no_unit_is_recommended(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", tmp_path / "none")
    (check,) = told(box)
    assert check.do == "start gpulockd; or run gpulock reap from cron every minute"


def test_a_reap_from_cron_does_while_it_is_fresh(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    write_verdicts(str(box.lock), {}, BOOT)
    assert (told(box), run(box).facts) == ([], ["gpulock reap instead of gpulockd"])
    later = clock_boottime() + FRESH + 1
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "clock_boottime", lambda: later)
        assert [check.state for check in told(box)] == [WARNING]
    write_verdicts(str(box.lock), {}, "33333333-3333-3333-3333-333333333333")  # another boot's
    assert [check.state for check in told(box)] == [WARNING]


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
    box: Box, boot: str, ago: float, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", box.root / "none")
    head = f"{sample.SAMPLE_LINE}\nboot_id={boot}\nboottime={clock_boottime() - ago}\n"
    (box.root / "run-exporter").mkdir()
    (box.root / "run-exporter" / "sample").write_text(head)
    found = [one for one in told(box) if one.name == "exporter"]
    assert [one.state for one in found] == [WARNING] * warned
    assert not warned or found[0].what == "down for 1m. Jobs are not affected"
    box.settings["QUARANTINE_ON"] = "missing ecc xid"
    unseen = [one.what.rpartition(". ")[2] for one in told(box) if one.name == "exporter"]
    assert unseen == ["ecc is not detected"] * (ago == 60)


def test_a_value_that_no_hook_reads_is_a_fault_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "gpulock.conf"
    path.write_text("QUARANTINE_ON=hot\nWEB_CONFIG=/none/web.yml\n")
    assert [one.state for one in check_settings(read_settings(str(path)), path)] == [FAULT, FAULT]
    path.write_text("QUARANTINE_ON=xid\n")
    assert [*check_settings(read_settings(str(path)), path)] == []


def test_places_that_no_job_gets_are_told(box: Box) -> None:
    def shares() -> list[Finding]:
        found = run_checks(node_checks(box.node().settings)).findings
        return [one for one in found if one.name == "SHARES"]

    assert shares() == []
    box.settings["SHARES"] = "0:4 9:2"
    (wrong,) = shares()
    assert (wrong.state, wrong.what.startswith("9:2 names no card here")) == (WARNING, True)
    box.settings["SHARES"] = "0:4"
    (box.state / "slurm-map").touch()
    assert [one.what for one in shares()] == ["no job of Slurm's gets a place by it"]
    box.settings |= {"SLURM_SHARDS": "share"}
    assert shares() == []
    box.settings |= {"SLURM_DEVICE_SELECTION": "gpulock"}
    assert [one.state for one in shares()] == [WARNING]
    (box.state / "sge-map").touch()
    assert shares() == []


def test_what_keeps_mps_from_starting_is_told(box: Box) -> None:
    box.settings |= {"SHARES": "0:4", "SHARE_MPS": "yes"}
    found = check_mps(box.node().settings, MpsPrograms("/bin/none", "/bin/true", "/bin/none"))
    assert [(one.state, one.what.partition(":")[0]) for one in found] == [
        (FAULT, "/bin/none is no program")
    ] * 2
    assert [*check_mps(box.node().settings, MpsPrograms(*["/bin/true"] * 3))] == []
