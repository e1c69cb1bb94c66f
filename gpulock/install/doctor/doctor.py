# SPDX-License-Identifier: Apache-2.0
"""`gpulock doctor`: look at everything a job's GPUs depend on, and say what to do about faults."""

from __future__ import annotations

from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.doctor.check import (
    INSTALLED,
    SETTINGS,
    Check,
    Report,
    fact,
    fault,
    run_checks,
)
from gpulock.install.doctor.containers import container_checks
from gpulock.install.doctor.daemon import daemon_checks, systemd_checks
from gpulock.install.doctor.installation import (
    check_installed,
    find_schedulers,
)
from gpulock.install.doctor.isolation import isolation_checks
from gpulock.install.doctor.node import check_settings, node_checks
from gpulock.install.doctor.sge import SgeChecks
from gpulock.install.doctor.slurm import SlurmChecks
from gpulock.install.sge.site import find_execds
from gpulock.install.slurm.site import find_slurmds
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings


def run_doctor(config: Path) -> Report:
    """Run every check of this node, in the order of a job's way."""
    try:
        settings = read_settings(str(config))
    except Refusal as refusal:
        unread = fault(refusal.why.removeprefix("settings: "), refusal.do)
        return run_checks([Check(SETTINGS, lambda: [unread])])
    return run_checks(all_checks(settings, config))


def all_checks(settings: Settings, config: Path) -> list[Check]:
    """Return the checks; a simulated node has no hooks, no scheduler and no services."""
    checks = [Check(SETTINGS, lambda: check_settings(settings, config))]
    common = [*node_checks(settings), *container_checks(settings)]
    if settings.simulation:
        return [*checks, Check(INSTALLED, lambda: [fact("a simulated node")]), *common]
    running = ["sge"] if find_execds() else []
    running += ["slurm"] if find_slurmds(settings) else []
    schedulers = find_schedulers(settings, running)
    checks += [
        Check(INSTALLED, lambda: check_installed(schedulers, running)),
        *common,
    ]
    if "sge" in schedulers:
        checks += SgeChecks(settings, config).checks()
    if "slurm" in schedulers:
        checks += SlurmChecks(settings, config).checks()
    checks += [*isolation_checks(settings, "slurm" in schedulers), *daemon_checks(settings)]
    return [*checks, *systemd_checks(config)]
