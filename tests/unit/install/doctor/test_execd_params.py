# SPDX-License-Identifier: Apache-2.0
"""execd's parameters: what takes jobs out of gpulock's sight is a fault, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.doctor.check import FAULT, WARNING
from gpulock.install.doctor.execd_params import check_execd_params, moves_jobs_to_scopes


def found(params: str, isolation: str = "off", scopes: bool = False) -> list[tuple[str, str]]:
    """Return (state, what to do) of each check."""
    lines = {"execd_params": params, "gid_range": "20000-20100"}
    return [(one.state, one.do) for one in check_execd_params(lines, isolation, scopes)]


def test_nothing_is_said_of_parameters_that_change_nothing() -> None:
    assert found("none") == []
    assert found("ENABLE_ADDGRP_KILL=true", "cgroup") == []


@pytest.mark.parametrize("value", ["systemd", "SYSTEMD"])
def test_jobs_that_systemd_starts_are_a_fault(value: str) -> None:
    """8.1.10 of daimh writes a group to `config` that no process of such a job carries."""
    assert found(f"USE_CGROUPS={value}") == [(FAULT, "remove it from execd_params")]
    assert found("USE_CGROUPS=true") == []


@pytest.mark.parametrize("params", ["none", "ENABLE_SYSTEMD=true", "USAGE_COLLECTION=NONE"])
def test_jobs_in_scopes_have_no_group_unless_they_are_told_to(params: str) -> None:
    assert found(params, scopes=True) == [(FAULT, "set ENABLE_ADDGRP_KILL=true in execd_params")]
    assert found(f"{params},ENABLE_ADDGRP_KILL=1", scopes=True) == []


@pytest.mark.parametrize("value", ["false", "0", "False"])
def test_execd_is_told_not_to_use_scopes(value: str) -> None:
    assert found(f"ENABLE_SYSTEMD={value}", "cgroup", scopes=True) == []


def test_isolation_by_cgroup_and_scopes_do_not_go_together() -> None:
    states = found("ENABLE_ADDGRP_KILL=TRUE", "cgroup", scopes=True)
    assert states == [(FAULT, "set ENABLE_SYSTEMD=false in execd_params, or ISOLATION=off")]
    assert found("ENABLE_ADDGRP_KILL=TRUE", "off", scopes=True) == []


def test_the_rest_is_said_as_before() -> None:
    assert found("ENABLE_ADDGRP_KILL=false")[0][0] == WARNING
    assert found("ENABLE_ADDGRP_KILL=false", scopes=True)[0][0] == FAULT
    assert found("INHERIT_ENV=0") == []


def test_scopes_are_used_where_the_cell_has_a_slice_and_systemd_runs(tmp_path: Path) -> None:
    common, systemd = tmp_path / "common", tmp_path / "systemd"
    common.mkdir()
    (common / "slice_name").write_text("ocs7544\n")
    assert not moves_jobs_to_scopes(common, systemd)
    systemd.mkdir()
    assert moves_jobs_to_scopes(common, systemd)
    (common / "slice_name").unlink()
    assert not moves_jobs_to_scopes(common, systemd)
