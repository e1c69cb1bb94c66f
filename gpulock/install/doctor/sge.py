# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Grid Engine: installed hooks, execd, its job files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.alloc.liveness import ProcessScan
from gpulock.install.doctor.check import Check, fault, ok, run_all, warning
from gpulock.install.doctor.hooks import InstalledHookChecks
from gpulock.install.doctor.sge_cluster import SgeClusterChecks
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.planner import current_settings
from gpulock.install.sge.site import Execd, find_execd, find_execds
from gpulock.install.trial import self_test_sge_hooks
from gpulock.install.versions import version_in_force
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.sge import cull, verdict

_SYS_RESOURCE: Final = 24  # linux/capability.h CAP_SYS_RESOURCE
_JOBS_READ: Final = 20


def _try_hooks(paths: HookPaths, _: str) -> None:
    self_test_sge_hooks(paths)


HOOKS: Final = InstalledHookChecks(
    "sge", lambda paths: paths.prolog, "every job fails", _try_hooks, "tried"
)


def sge_checks(settings: Settings, config: Path, prefix: Path, profile: Path) -> list[Check]:
    """Return the checks of a node of Grid Engine; none where there is no Grid Engine."""
    execds = find_execds()
    _, given = current_settings(config)
    if not execds and "SGE_ROOT" not in given and version_in_force(prefix) is None:
        return []
    cell = settings.sge_cell if "SGE_CELL" in given else ""
    execd = find_execd(execds, settings.sge_root, cell)
    checks = run_all(
        {
            "hooks": lambda: HOOKS.check(settings, config, prefix),
            "execd": lambda: check_execd(settings, execd),
            "job files": lambda: check_execd_job_files(execd),
        }
    )
    try:
        cluster = SgeClusterChecks(settings, given, execd, prefix, profile)
    except (OSError, InstallError) as reason:
        what = f"could not be asked: {reason}; queues, complexes and sensor were not looked at"
        return [*checks, warning(what, "run it again when qmaster answers", "qmaster")]
    return [*checks, *cluster.checks()]


def check_execd(settings: Settings, execd: Execd | None) -> Iterator[Check]:
    """Look whether execd can be seen, as the reaper must, and may lift a job's limits."""
    if execd is None:
        yield fault("no sge_execd runs here", "start it")
        return
    if blind := verdict.why_execd_hidden(ProcessScan(Proc(settings.proc_root))):
        yield fault(blind, "run gpulock outside containers, as root with CAP_SYS_PTRACE")
        return
    yield ok(f"pid {execd.pid}, spool {execd.spool}")
    status = Path(f"/proc/{execd.pid}/status").read_text()
    bounds = int(status.partition("CapBnd:")[2].split(None, 1)[0], 16)
    if not bounds >> _SYS_RESOURCE & 1:
        what = "execd lacks CAP_SYS_RESOURCE: hooks run under the job's own limits"
        yield warning(what, "use prolog/sge-jsv-limits as jsv_url", "limits")


def check_execd_job_files(execd: Execd | None) -> Iterator[Check]:
    """Look whether execd's files of the jobs that run now can be read."""
    read = 0
    for path in sorted(execd.spool.glob("jobs/*/*/*"))[:_JOBS_READ] if execd else ():
        try:
            cull.parse_cull_job(path.read_bytes())
            read += 1
        except FileNotFoundError:
            continue
        except cull.LayoutError as reason:
            what = f"{path}: {reason}: every job is asked for by qstat"
            yield warning(what, "report this with the version of Grid Engine")
            return
    if read:
        yield ok(f"{read} read")
