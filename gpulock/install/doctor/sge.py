# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Grid Engine: installed hooks, execd, its job files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.alloc.liveness import ProcessScan
from gpulock.install.doctor.check import Check, fault_check, ok_check, run_checks, warning_check
from gpulock.install.doctor.sge_cluster import SgeClusterChecks
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.planner import current_settings
from gpulock.install.sge.site import Execd, find_execd, find_execds
from gpulock.install.trial import self_test_sge_hooks
from gpulock.install.versions import CURRENT, InstalledHooks, version_in_force
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.sge import cull, verdict

_AGAIN: Final = "run gpulock install sge again"
_SYS_RESOURCE: Final = 24  # linux/capability.h CAP_SYS_RESOURCE
_JOBS_READ: Final = 20
_PRIVATE: Final = ("/root/", "/home/")


def sge_checks(settings: Settings, config: Path, prefix: Path, profile: Path) -> list[Check]:
    """Return the checks of a node of Grid Engine; none where there is no Grid Engine."""
    execds = find_execds()
    _, given = current_settings(config)
    if not execds and "SGE_ROOT" not in given and version_in_force(prefix) is None:
        return []
    cell = settings.sge_cell if "SGE_CELL" in given else ""
    execd = find_execd(execds, settings.sge_root, cell)
    checks = [
        *run_checks("hooks", lambda: check_sge_hooks(config, prefix, Path(settings.lock_dir))),
        *run_checks("execd", lambda: check_execd(settings, execd)),
        *run_checks("job files", lambda: check_execd_job_files(execd)),
    ]
    try:
        cluster = SgeClusterChecks(settings, given, execd, prefix, profile)
    except (OSError, InstallError) as reason:
        what = f"could not be asked: {reason}; queues, complexes and sensor were not looked at"
        return [*checks, warning_check("qmaster", what, "run it again when qmaster answers")]
    return [*checks, *cluster.checks()]


def check_sge_hooks(config: Path, prefix: Path, lock_dir: Path) -> Iterator[Check]:
    """Look at the installed hooks, their interpreter, and start them as a test."""
    name = "hooks"
    current = version_in_force(prefix)
    if current is None:
        yield fault_check(name, f"none below {prefix}", "run gpulock install sge")
        return
    paths = HookPaths(prefix / current)
    if not paths.prolog.is_file():
        yield fault_check(name, f"{prefix / CURRENT} leads nowhere: every job fails", _AGAIN)
        return
    interpreter = paths.prolog.read_text().partition(" -IS\n")[0].removeprefix("#!")
    if not Path(interpreter).is_file():
        yield fault_check(name, f"their interpreter {interpreter} is gone: every job fails", _AGAIN)
        return
    if interpreter.startswith(_PRIVATE):
        yield warning_check(
            name, f"{interpreter} is below a home directory", "install with another python"
        )
    place = InstalledHooks(prefix, config, interpreter, lock_dir)
    found, wanted = place.read(), place.wanted()
    if found != wanted and found is not None and found.startswith(f"{wanted} "):
        yield fault_check(name, f"not as they were installed: {found}", _AGAIN)
    elif found != wanted:
        yield warning_check(name, f"version {found} is in force, this package is {wanted}", _AGAIN)
    try:
        self_test_sge_hooks(paths)
    except InstallError as reason:
        yield fault_check(name, str(reason), _AGAIN)
        return
    yield ok_check(name, f"{prefix / CURRENT} -> {current}, tried")


def check_execd(settings: Settings, execd: Execd | None) -> Iterator[Check]:
    """Look whether execd can be seen, as the reaper must, and may lift a job's limits."""
    name = "execd"
    if execd is None:
        yield fault_check(name, "no sge_execd runs here", "start it")
        return
    if blind := verdict.why_execd_hidden(ProcessScan(Proc(settings.proc_root))):
        yield fault_check(
            name, blind, "run gpulock outside containers, as root with CAP_SYS_PTRACE"
        )
        return
    yield ok_check(name, f"pid {execd.pid}, spool {execd.spool}")
    status = Path(f"/proc/{execd.pid}/status").read_text()
    bounds = int(status.partition("CapBnd:")[2].split(None, 1)[0], 16)
    if not bounds >> _SYS_RESOURCE & 1:
        what = "execd lacks CAP_SYS_RESOURCE: hooks run under the job's own limits"
        yield warning_check("limits", what, "use prolog/sge-jsv-limits as jsv_url")


def check_execd_job_files(execd: Execd | None) -> Iterator[Check]:
    """Look whether execd's files of the jobs that run now can be read."""
    if execd is None:
        return
    read = 0
    for path in sorted(execd.spool.glob("jobs/*/*/*"))[:_JOBS_READ]:
        try:
            cull.parse_cull_job(path.read_bytes())
            read += 1
        except FileNotFoundError:
            continue
        except cull.LayoutError as reason:
            what = f"{path}: {reason}: every job is asked for by qstat"
            yield warning_check("job files", what, "report this with the version of Grid Engine")
            return
    if read:
        yield ok_check("job files", f"{read} read")
