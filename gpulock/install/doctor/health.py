# SPDX-License-Identifier: Apache-2.0
"""What doctor says of quarantine by policy: what is set, what is out and why, who keeps counts."""

from __future__ import annotations

from collections.abc import Iterator

from gpulock.daemon.health import policy as health
from gpulock.daemon.health.findings import CAUSES, MISSING
from gpulock.daemon.slots import slurm, state
from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import Check, fault_check, ok_check, run_checks, warning_check
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.quarantine import POLICY
from gpulock.text.advice import quarantine_end_condition

NAME, COUNT = "quarantine", "counts"
SEE = "see docs/quarantine.md"


def health_checks(settings: Settings) -> list[Check]:
    """Return the checks of quarantine and of what the schedulers are told of it."""
    return [
        *run_checks(NAME, lambda: check_quarantine_policy(settings)),
        *run_checks(NAME, lambda: check_quarantined_devices(settings)),
        *run_checks(COUNT, lambda: check_scheduler_counts(settings)),
    ]


def check_quarantine_policy(settings: Settings) -> Iterator[Check]:
    """Look whether what is set can work."""
    wanted = settings.quarantine_on
    wrong = [word for word in wanted if word not in CAUSES]
    if wrong:
        do = f"QUARANTINE_ON takes {' '.join(CAUSES)}"
        yield fault_check(NAME, f"QUARANTINE_ON={wrong[0]} is not understood, and does nothing", do)
    if not wanted:
        yield ok_check(NAME, "by hand alone (QUARANTINE_ON is empty)")
        return
    told = [word for word in wanted if word in CAUSES and word != MISSING]
    node = Node(settings)
    found = sample.read_sample(
        settings.exporter_dir, clock_boottime(), node.boot_id, settings.max_sample_age
    )
    if told and found is None:
        do = "start gpulock-exporter"
        yield warning_check(NAME, f"{' '.join(told)}: no exporter tells, so nothing is seen", do)
    elif not wrong:
        back = f"back after {max(1, settings.restore_after)} clean checks where the cause allows"
        yield ok_check(NAME, f"on {' '.join(wanted)}; {back}")


def check_quarantined_devices(settings: Settings) -> Iterator[Check]:
    """Tell what is out of service, why, and what brings it back."""
    for name, note in health.read_quarantine_notes(Node(settings)).items():
        reason, by = note.get("reason", "no reason noted"), note.get("by", "")
        back = quarantine_end_condition(f"{reason} ({by})") if by == POLICY else "an administrator"
        who = f" ({by})" if by else ""
        do = f"{back} brings it back; gpulock restore {name}"
        yield warning_check(NAME, f"{name} is out of service: {reason}{who}", do)


def check_scheduler_counts(settings: Settings) -> Iterator[Check]:
    """Tell which counts gpulockd here keeps, and what it changed."""
    for (host, name), one in state.load_lowered_counts(settings.state_dir).items():
        if one.stage == state.THEIRS:
            what = (
                f"{name} of {host} was set to {one.now} by others, and gpulock does not change it"
            )
            yield warning_check(COUNT, what, SEE)
        else:
            yield warning_check(COUNT, f"{name} of {host} is {one.now} instead of {one.base}", SEE)
    drained = slurm.read_drained_devices(settings)
    if drained:
        yield warning_check(COUNT, f"this node was drained at Slurm because of {drained}", SEE)
    if settings.sge_count_hosts:
        yield ok_check(
            COUNT, f"Grid Engine's of {' '.join(settings.sge_count_hosts)} are kept here"
        )
        if not settings.sge_root:
            yield fault_check(COUNT, "SGE_COUNT_HOSTS is set, SGE_ROOT is not", "set SGE_ROOT")
