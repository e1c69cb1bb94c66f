# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Slurm: the hooks as users run them, slurmd, slurmctld."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.alloc.process_scan import ProcessScan
from gpulock.install.doctor.check import Check, fault, ok, run_all, run_checks, warning
from gpulock.install.doctor.hooks import InstalledHookChecks
from gpulock.install.doctor.slurm_conf import SlurmConfChecks
from gpulock.install.doctor.slurm_gres import GresChecks
from gpulock.install.doctor.slurm_release import release_checks
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.installed import is_slurm_installed
from gpulock.install.node_part import current_settings
from gpulock.install.slurm.site import (
    Slurmd,
    SlurmError,
    SlurmSite,
    find_slurm_site,
    find_slurmds,
    slurmds_of_site,
)
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.install.trial import check_hook_interpreter, try_slurm_hooks
from gpulock.install.versions import CURRENT
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.slurm.steps import SlurmSteps

_FEW: Final = 100  # characters of a value that are shown
_SAME: Final = ("Prolog", "TaskProlog", "Epilog", "PrologFlags", "RequeueExit")


def _try_hooks(paths: HookPaths, interpreter: str) -> None:
    check_hook_interpreter(interpreter)
    try_slurm_hooks(paths)


HOOKS: Final = InstalledHookChecks(
    "slurm",
    lambda paths: paths.slurm_prolog,
    "Slurm drains the node at the next job",
    _try_hooks,
    "tried, as a user too",
)


def slurm_checks(settings: Settings, config: Path, prefix: Path) -> list[Check]:
    """Return the checks of a node of Slurm; none where there is no Slurm."""
    _, given = current_settings(config)
    slurmds = slurmds_of_site(find_slurmds(), settings)
    if not is_slurm_installed(settings, prefix):
        what = "slurmd runs here, but gpulock is not installed for it: its jobs get no lock"
        return [warning(what, "gpulock install slurm", "Slurm")] if slurmds else []
    checks = run_all(
        {
            "Slurm hooks": lambda: HOOKS.check(settings, config, prefix),
            "slurmd": lambda: check_slurmd(settings, slurmds),
        }
    )
    try:
        site = find_slurm_site(settings, given, slurmds)
    except InstallError as reason:
        what = f"could not be found: {reason}; its configuration was not looked at"
        return [*checks, warning(what, "run it again when slurmd runs", "Slurm")]
    conf, answer = check_slurmctld(site)
    checks.append(answer)
    if conf is None:
        return checks
    paths = HookPaths(prefix / CURRENT)
    checks += run_checks("slurm.conf", lambda: check_slurm_conf_same(site, conf))
    checks += SlurmConfChecks(settings, site, conf, paths).checks()
    checks += release_checks(settings, site, conf)
    return checks + GresChecks(settings, site, conf).checks()


def check_slurmd(settings: Settings, slurmds: list[Slurmd]) -> Iterator[Check]:
    """Look whether slurmd can be seen, as the reaper must."""
    if not slurmds:
        yield fault("none runs here", "start it: systemctl start slurmd")
    elif not SlurmSteps(settings).is_slurmd_seen(ProcessScan(Proc(settings.proc_root))):
        what = "it runs, but a judge of locks does not see it: no lock is ever freed"
        yield fault(what, "run gpulock outside containers, as root with CAP_SYS_PTRACE")
    else:
        nodes = " ".join(slurmd.node for slurmd in slurmds if slurmd.node)
        pids = " ".join(str(slurmd.pid) for slurmd in slurmds)
        yield ok(f"pid {pids}{f', node {nodes}' if nodes else ''}")


def check_slurmctld(site: SlurmSite) -> tuple[SlurmConf | None, Check]:
    """Return what is in force, else what slurm.conf says, and whether slurmctld answers."""
    name = "slurmctld"
    try:
        conf = site.in_force()
    except SlurmError as silent:
        try:
            conf = site.in_file()
        except InstallError as reason:
            do = "see that slurmctld runs, and that SLURM_CONF and SLURM_BINARIES are right"
            return None, fault(f"{silent}; and {reason}", do, name)
        what = f"{silent}; what follows is by {conf.source}, which may not be in force"
        return conf, warning(what, "run it again when slurmctld answers", name)
    return conf, ok(f"answers, Slurm {conf.get('SLURM_VERSION')}", name)


def check_slurm_conf_same(site: SlurmSite, conf: SlurmConf) -> Iterator[Check]:
    """Compare slurm.conf on this node, by which slurmd goes, with what slurmctld goes by."""
    if site.conf is None:
        yield warning("not found on this node", "set SLURM_CONF in the settings")
        return
    here = site.in_file()
    differing = [key for key in _SAME if {*here.words(key)} != {*conf.words(key)}]
    if {*here.words("PrologFlags")} <= {*conf.words("PrologFlags")}:  # Contain brings Alloc
        differing = [key for key in differing if key != "PrologFlags"]
    for key in differing:
        mine, theirs = here.get(key) or "none", conf.get(key) or "none"
        what = f"{key} is {mine[:_FEW]} in {here.source}, but slurmctld uses {theirs[:_FEW]}"
        yield warning(what, "make slurm.conf the same everywhere, then scontrol reconfigure")
    if not differing:
        yield ok(here.source)
