# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at in Grid Engine itself: its release, its shepherd, the jobs it spools."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.alloc.process_scan import ProcessScan
from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.doctor.check import Check, fault, ok, warning
from gpulock.install.hooks import InstallError
from gpulock.install.sge.programs import (
    find_sge_shepherd,
    is_executable_file,
    release_fault,
    try_sge_shepherd,
)
from gpulock.node.procfs import Proc, status_line_value
from gpulock.node.settings import Settings
from gpulock.sge import shepherds
from gpulock.sge.spooled_job import LayoutError, parse_spooled_job

_AGAIN: Final = "run gpulock install sge again"
_CORRECT: Final = "correct SGE_SHEPHERD, " + _AGAIN
_JOBS_READ: Final = 20
_SYS_RESOURCE: Final = 24  # linux/capability.h CAP_SYS_RESOURCE


def check_sge_release(settings: Settings, execd: SchedulerDaemon | None) -> Iterator[Check]:
    """Look whether this Grid Engine is one that gpulock was run on."""
    root = settings.sge_root or (execd.env.get("SGE_ROOT", "") if execd else "")
    beside = execd.program.parent / "sge_shepherd" if execd else None
    real = beside if beside and beside.is_file() else find_sge_shepherd(settings, Path(root), execd)
    release = try_sge_shepherd(real, root, execd)
    if not release:
        yield warning(f"its release is not known: {real} is the site's own", "start execd")
    elif why := release_fault(release):
        do = "its jobs wait until gpulock is taken out; see docs/grid-engine.md for those it knows"
        yield fault(why, do)
    else:
        yield ok(f"{release}, {real.parent}")


def check_launcher(launcher: Path, root: str, execd: SchedulerDaemon | None) -> Iterator[Check]:
    """Look whether the shepherd that a shepherd_cmd of ours becomes is there, runs, and fits."""
    if not launcher.is_file():
        yield fault(f"{launcher} is not there: no job starts", _AGAIN)
        return
    line = re.search(r"(?m)^SHEPHERD=(.*)$", launcher.read_text())
    words = shlex.split(line[1], comments=True) if line else []
    real = Path(words[0]) if words else None
    if real is None or not is_executable_file(real):
        yield fault(f"{real or 'the real shepherd'} is not there: no job starts", _CORRECT)
        return
    try:
        release = try_sge_shepherd(real, root, execd)
        beside = execd.program.parent / real.name if execd else real
        other = try_sge_shepherd(beside, root, execd) if beside.is_file() else ""
    except InstallError as reason:
        yield fault(f"{reason}: no job starts", _CORRECT)
        return
    if release and other and release != other:
        yield fault(f"{real} is of {release}, execd of {other}", _CORRECT)
    else:
        yield ok(f"{launcher}, then {real}")


def check_execd(settings: Settings, execd: SchedulerDaemon | None) -> Iterator[Check]:
    """Look whether execd can be seen, as the reaper must, and may lift a job's limits."""
    if execd is None:
        yield fault("no sge_execd runs here", "start it")
    elif blind := shepherds.why_execd_hidden(ProcessScan(Proc(settings.proc_root))):
        yield fault(blind, "run gpulock outside containers, as root with CAP_SYS_PTRACE")
    else:
        yield ok(f"pid {execd.pid}, spool {execd.folder}")
        bounds = int(status_line_value(Proc().read(execd.pid, "status"), b"\nCapBnd:"), 16)
        if not bounds >> _SYS_RESOURCE & 1:
            what = "execd lacks CAP_SYS_RESOURCE: hooks run under the job's own limits"
            yield warning(what, "use prolog/sge-jsv-limits as jsv_url", "limits")


def check_execd_job_files(execd: SchedulerDaemon | None) -> Iterator[Check]:
    """Look whether execd's files of the jobs that run now can be read."""
    read = 0
    for path in sorted(execd.folder.glob("jobs/*/*/*"))[:_JOBS_READ] if execd else ():
        try:
            parse_spooled_job(path.read_bytes())
            read += 1
        except FileNotFoundError:
            continue
        except LayoutError as reason:
            what = f"{path}: {reason}: such a job waits, as 99 of the prolog"
            yield warning(what, "report this with the version of Grid Engine")
            return
    if read:
        yield ok(f"{read} read")
