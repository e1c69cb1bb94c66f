# SPDX-License-Identifier: Apache-2.0
"""`gpulock doctor`: look at everything a job's GPUs depend on, and say what to do about faults.

What cannot be found out is a warning with the reason, never silently well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import BROKEN, FAULT, OK, WARNING, Check
from gpulock.install.doctor.containers import container_checks
from gpulock.install.doctor.daemon import daemon_checks
from gpulock.install.doctor.isolation import isolation_checks
from gpulock.install.doctor.node import check_settings_file, node_checks
from gpulock.install.doctor.policies import handover_checks, policy_checks
from gpulock.install.doctor.sge import sge_checks
from gpulock.install.doctor.slurm import slurm_checks
from gpulock.install.doctor.systemd import systemd_checks
from gpulock.install.installed import (
    find_installed_prefix,
    find_sge_installation,
    find_slurm_installation,
)
from gpulock.install.node_part import current_settings
from gpulock.install.sge.install import PROFILE
from gpulock.install.sge.site import find_execds
from gpulock.install.systemd.install import SystemdOptions
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH
from gpulock.text.table import UNCUT, wrap_sentence

MARKS: Final = {OK: "✓", WARNING: "!", FAULT: "✗"}


@dataclass(frozen=True)
class DoctorOptions:
    """What doctor looks at; a simulated node has no hooks and no scheduler.

    Without a prefix, where the hooks were installed last.
    """

    config: Path = Path(DEFAULT_PATH)
    prefix: Path | None = None
    profile: Path = PROFILE


def run_doctor(where: DoctorOptions) -> list[Check]:
    """Return every check of this node, in the order of a job's way."""
    settings, first = check_settings_file(where.config)
    if settings is None:
        return first
    checks = [*first, *node_checks(settings), *container_checks(settings)]
    checks += policy_checks(settings)
    if not settings.simulation:
        prefix = where.prefix or find_installed_prefix(settings)
        if not is_slurm_only(settings, where.config):
            checks += sge_checks(settings, where.config, prefix, where.profile)
        checks += slurm_checks(settings, where.config, prefix)
        checks += daemon_checks(settings)
        checks += systemd_checks(settings, SystemdOptions(where.config))
        checks += isolation_checks(settings)
        checks += handover_checks(settings)
    return checks


def is_slurm_only(settings: Settings, config: Path) -> bool:
    """Say whether the hooks are here for Slurm, and nothing is of Grid Engine."""
    _, given = current_settings(config)
    if find_slurm_installation(settings) is None:
        return False
    return not (find_sge_installation(settings) or "SGE_ROOT" in given or find_execds())


def doctor_exit_code(checks: Iterable[Check]) -> int:
    """Return 0, or 3 (this node is broken) for any fault."""
    return BROKEN if any(check.state == FAULT for check in checks) else 0


def print_checks(checks: Iterable[Check], echo: Callable[[str], None], width: int = UNCUT) -> None:
    """Print each check with its mark, and what to do below a fault, in lines of `width`."""
    for check in checks:
        found = f"{MARKS[check.state]} {check.name}: {check.what}"
        do = [f"    {line}" for line in wrap_sentence(check.do, width - 4)]
        for line in [*wrap_sentence(found, width, "  "), *do]:
            echo(line)
