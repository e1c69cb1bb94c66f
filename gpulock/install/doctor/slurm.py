# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Slurm: the hooks as users run them, slurmd, slurmctld."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.alloc.liveness import ProcessScan
from gpulock.install.change import install_record
from gpulock.install.doctor.check import Check, fault_check, ok_check, run_checks, warning_check
from gpulock.install.doctor.slurm_conf import SlurmConfChecks
from gpulock.install.doctor.slurm_gres import GresChecks
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.planner import current_settings
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
from gpulock.install.versions import CURRENT, InstalledHooks, version_in_force
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.slurm.steps import SlurmSteps

_AGAIN: Final = "run gpulock install slurm again"
_FEW: Final = 100  # characters of a value that are shown


def slurm_checks(settings: Settings, config: Path, prefix: Path) -> list[Check]:
    """Return the checks of a node of Slurm; none where there is no Slurm."""
    _, given = current_settings(config)
    slurmds = slurmds_of_site(find_slurmds(), settings)
    if not install_record(settings, "slurm").load():
        if not slurmds:
            return []
        what = "slurmd runs here, but gpulock is not installed for it: its jobs get no lock"
        return [warning_check("Slurm", what, "gpulock install slurm")]
    checks = [
        *run_checks(
            "Slurm hooks", lambda: check_slurm_hooks(config, prefix, Path(settings.lock_dir))
        ),
        *run_checks("slurmd", lambda: check_slurmd(settings, slurmds)),
    ]
    try:
        site = find_slurm_site(settings, given, slurmds)
    except InstallError as reason:
        what = f"could not be found: {reason}; its configuration was not looked at"
        return [*checks, warning_check("Slurm", what, "run it again when slurmd runs")]
    conf, answer = check_slurmctld(site)
    checks.append(answer)
    if conf is None:
        return checks
    paths = HookPaths(prefix / CURRENT)
    checks += run_checks("slurm.conf", lambda: check_slurm_conf_same(site, conf))
    checks += SlurmConfChecks(settings, site, conf, paths).checks()
    checks += GresChecks(settings, site, conf).checks()
    return checks


def check_slurm_hooks(config: Path, prefix: Path, lock_dir: Path) -> Iterator[Check]:
    """Look at the installed hooks and their interpreter, and start them, one as nobody."""
    name = "Slurm hooks"
    current = version_in_force(prefix)
    if current is None:
        yield fault_check(
            name, f"none below {prefix}: Slurm drains the node", "gpulock install slurm"
        )
        return
    paths = HookPaths(prefix / current)
    if not paths.slurm_prolog.is_file():
        what = f"{prefix / CURRENT} has no prolog/slurm: Slurm drains the node at the next job"
        yield fault_check(name, what, _AGAIN)
        return
    interpreter = paths.slurm_prolog.read_text().partition(" -IS\n")[0].removeprefix("#!")
    if not Path(interpreter).is_file():
        yield fault_check(name, f"their interpreter {interpreter} is gone: every job fails", _AGAIN)
        return
    place = InstalledHooks(prefix, config, interpreter, lock_dir)
    found, wanted = place.read(), place.wanted()
    if found != wanted and found is not None and found.startswith(f"{wanted} "):
        yield fault_check(name, f"not as they were installed: {found}", _AGAIN)
    elif found != wanted:
        yield warning_check(name, f"version {found} is in force, this package is {wanted}", _AGAIN)
    try:
        check_hook_interpreter(interpreter)
        try_slurm_hooks(paths)
    except InstallError as reason:
        yield fault_check(name, str(reason), _AGAIN)
        return
    yield ok_check(name, f"{prefix / CURRENT} -> {current}, tried, as a user too")


def check_slurmd(settings: Settings, slurmds: list[Slurmd]) -> Iterator[Check]:
    """Look whether slurmd can be seen, as the reaper must."""
    name = "slurmd"
    if not slurmds:
        yield fault_check(name, "none runs here", "start it: systemctl start slurmd")
    elif not SlurmSteps(settings).is_slurmd_seen(ProcessScan(Proc(settings.proc_root))):
        what = "it runs, but a judge of locks does not see it: no lock is ever freed"
        yield fault_check(name, what, "run gpulock outside containers, as root with CAP_SYS_PTRACE")
    else:
        nodes = " ".join(slurmd.node for slurmd in slurmds if slurmd.node)
        pids = " ".join(str(slurmd.pid) for slurmd in slurmds)
        yield ok_check(name, f"pid {pids}{f', node {nodes}' if nodes else ''}")


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
            return None, fault_check(name, f"{silent}; and {reason}", do)
        what = f"{silent}; what follows is by {conf.source}, which may not be in force"
        return conf, warning_check(name, what, "run it again when slurmctld answers")
    return conf, ok_check(name, f"answers, Slurm {conf.get('SLURM_VERSION')}")


def check_slurm_conf_same(site: SlurmSite, conf: SlurmConf) -> Iterator[Check]:
    """Compare slurm.conf on this node, by which slurmd goes, with what slurmctld goes by."""
    name = "slurm.conf"
    if site.conf is None:
        yield warning_check(name, "not to be found on this node", "set SLURM_CONF in the settings")
        return
    here = site.in_file()
    if here.source == conf.source:
        yield ok_check(name, here.source)
        return
    differing = [key for key in _SAME if set(here.words(key)) != set(conf.words(key))]
    for key in differing:
        if key == "PrologFlags" and set(here.words(key)) <= set(conf.words(key)):
            continue  # Contain brings Alloc
        mine, theirs = here.get(key) or "none", conf.get(key) or "none"
        what = f"{key} is {mine[:_FEW]} in {here.source}, but slurmctld goes by {theirs[:_FEW]}"
        do = "make slurm.conf the same everywhere, then scontrol reconfigure"
        yield warning_check(name, what, do)
    yield ok_check(name, here.source)


_SAME: Final = ("Prolog", "TaskProlog", "Epilog", "PrologFlags", "RequeueExit")
