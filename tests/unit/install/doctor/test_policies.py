# SPDX-License-Identifier: Apache-2.0
"""Doctor says whether settings can do on this node what they are set to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import FAULT, OK, WARNING
from gpulock.install.doctor.node import check_settings_file
from gpulock.install.doctor.policies import handover_checks
from gpulock.node import sample
from tests.support.faults import raising
from tests.support.trees import BOOT, Box, bus


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "exporter").mkdir()
    return Box(tmp_path, EXPORTER_DIR=str(tmp_path / "exporter"))


def states(box: Box, clean: str) -> list[str]:
    box.settings["LEFTOVER_PROCESSES"] = clean
    return [check.state for check in handover_checks(box.node().settings)]


def tell(box: Box, text: str) -> None:
    head = f"{sample.SAMPLE_LINE}\nboot_id={BOOT}\nboottime={clock_boottime()}\n"
    (box.root / "exporter" / "sample").write_text(f"{head}device {bus(0)} {text}\n")


def test_off_is_well(box: Box) -> None:
    assert states(box, "off") == [OK]


@pytest.mark.parametrize("clean", ["report", "kill"])
def test_without_an_exporter_memory_is_not_seen(box: Box, clean: str) -> None:
    assert states(box, clean) == [WARNING]
    tell(box, "index=0")
    assert states(box, clean) == [WARNING]
    tell(box, "memory_used=0")
    assert states(box, clean) == [OK]


def test_where_the_kernel_has_no_pidfd_kill_is_a_fault(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", raising(OSError(38, "Function not implemented")))
    tell(box, "memory_used=0")
    assert states(box, "kill") == [FAULT, OK]
    assert states(box, "report") == [OK]


def test_a_value_that_no_hook_reads_is_a_fault_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "gpulock.conf"
    path.write_text("QUARANTINE_ON=hot\nWEB_CONFIG=/none/web.yml\n")
    settings, checks = check_settings_file(path)
    assert settings is not None
    assert [check.state for check in checks] == [FAULT, FAULT]
    path.write_text("QUARANTINE_ON=xid\n")
    assert [check.state for check in check_settings_file(path)[1]] == [OK]
