# SPDX-License-Identifier: Apache-2.0
"""What doctor says of execd's parameters: how jobs start and end, and what systemd has in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import Finding, fault, warning
from gpulock.install.systemd.manager import RUNNING

_OFF: Final = ("FALSE", "0")
_ON: Final = ("TRUE", "1")
_REMOVE: Final = "remove it from execd_params"


def moves_jobs_to_scopes(common: Path, systemd: Path = RUNNING) -> bool:
    """Say whether execd moves jobs to scopes unless told not to (Open Cluster Scheduler 9.1).

    `common` is the cell's folder: execd reads the name of its slice there.
    """
    return systemd.is_dir() and (common / "slice_name").is_file()


def check_execd_params(lines: Mapping[str, str], isolation: str, scopes: bool) -> Iterator[Finding]:
    """Look at the parameters in force; `scopes`: execd moves jobs there by default; pure."""
    words = frozenset(lines.get("execd_params", "").upper().replace(",", " ").split())

    def says(name: str, values: tuple[str, ...]) -> bool:
        return any(f"{name}={value}" in words for value in values)

    if says("USE_CGROUPS", ("SYSTEMD",)):
        what = "USE_CGROUPS=systemd: no process can be known as a job's: GPU jobs are refused"
        yield fault(what, _REMOVE)
    scopes = scopes and not says("ENABLE_SYSTEMD", _OFF)
    if scopes and isolation != "off":
        what = "execd moves jobs to scopes of systemd: with ISOLATION=cgroup all are refused"
        yield fault(what, "set ENABLE_SYSTEMD=false in execd_params, or ISOLATION=off")
    if scopes and not says("ENABLE_ADDGRP_KILL", _ON):
        what = "jobs have no supplementary group: without an epilog their GPUs stay locked"
        yield fault(what, "set ENABLE_ADDGRP_KILL=true in execd_params")
    elif says("ENABLE_ADDGRP_KILL", _OFF):
        what = "ENABLE_ADDGRP_KILL=false: stray processes of a job keep running and keep its GPUs"
        yield warning(what, _REMOVE)
