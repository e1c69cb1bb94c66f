# SPDX-License-Identifier: Apache-2.0
"""Doctor says whether settings can do on this node what they are set to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.mps.unit import MpsPrograms
from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import FAULT, WARNING, run_checks
from gpulock.install.doctor.daemon import daemon_checks
from gpulock.install.doctor.node import check_mps, check_settings, node_checks
from gpulock.install.systemd import manager
from gpulock.node import sample
from gpulock.node.settings_file import read_settings
from tests.support.trees import BOOT, Box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "run-exporter").mkdir()
    return Box(tmp_path)


@pytest.mark.parametrize(("boot", "ago", "warned"), [(BOOT, 5, 0), (BOOT, 60, 1), ("x", 60, 0)])
def test_an_exporter_that_wrote_in_this_boot_and_writes_no_more_is_a_warning(
    box: Box, boot: str, ago: float, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", box.root / "none")
    head = f"{sample.SAMPLE_LINE}\nboot_id={boot}\nboottime={clock_boottime() - ago}\n"
    (box.root / "run-exporter" / "sample").write_text(head)
    report = run_checks(daemon_checks(box.node().settings))
    found = [one for one in report.findings if one.name == "exporter"]
    assert [one.state for one in found] == [WARNING] * warned
    assert not warned or found[0].what == "down for 1m. Jobs are not affected"


def test_a_value_that_no_hook_reads_is_a_fault_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "gpulock.conf"
    path.write_text("QUARANTINE_ON=hot\nWEB_CONFIG=/none/web.yml\n")
    assert [one.state for one in check_settings(read_settings(str(path)), path)] == [FAULT, FAULT]
    path.write_text("QUARANTINE_ON=xid\n")
    assert [*check_settings(read_settings(str(path)), path)] == []


def told_of(box: Box, name: str) -> list[tuple[str, str]]:
    found = run_checks(node_checks(box.node().settings)).findings
    return [(check.state, check.what) for check in found if check.name == name]


def shares_of(box: Box) -> list[tuple[str, str]]:
    return told_of(box, "SHARES")


def test_places_of_no_card_are_told(box: Box) -> None:
    assert shares_of(box) == []
    box.settings["SHARES"] = "0:4 9:2"
    (wrong,) = shares_of(box)
    assert wrong[0] == WARNING
    assert wrong[1].startswith("9:2 names no card here")


def test_what_keeps_mps_from_starting_is_told(box: Box) -> None:
    assert told_of(box, "SHARE_MPS") == []
    own = {"SHARES": "0:4", "SHARE_MPS": "yes"}
    box.settings |= own
    told = list(check_mps(box.node().settings, MpsPrograms("/bin/none", "/bin/true", "/bin/none")))
    assert [(one.state, one.what.partition(":")[0]) for one in told] == [
        (FAULT, "/bin/none is no program"),
        (FAULT, "/bin/none is no program"),
    ]
    found = check_mps(box.node().settings, MpsPrograms("/bin/true", "/bin/true", "/bin/true"))
    assert [*found] == []
