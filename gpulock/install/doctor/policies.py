# SPDX-License-Identifier: Apache-2.0
"""Doctor's checks of policies: quarantine, the drain at Slurm."""

from __future__ import annotations

from collections.abc import Iterator

from gpulock.daemon.health import policy as health
from gpulock.daemon.health.card_checks import SERIOUS
from gpulock.daemon.health.findings import MISSING, POLICY_WORDS, XID
from gpulock.daemon.idle.command import check_program_trust
from gpulock.daemon.slots import slurm
from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import INSTALLED, Check, Finding, fault, warning
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.checks import read_card_checks
from gpulock.store.quarantine import POLICY
from gpulock.text.advice import quarantine_end_condition


def policy_checks(settings: Settings) -> list[Check]:
    """Return the checks of quarantine, and of the drain at Slurm."""
    return [
        Check("quarantine", lambda: check_quarantine_policy(settings), (INSTALLED,)),
        Check("checks", lambda: check_card_checks(settings)),
        Check("HEALTH_COMMAND", lambda: check_health_command(settings)),
        Check("out of service", lambda: check_quarantined_devices(settings)),
        Check("drain", lambda: check_slurm_drain(settings)),
    ]


def read_current_sample(settings: Settings) -> sample.Sample | None:
    """Return what the exporter says now, None where it says nothing."""
    folder, oldest = settings.exporter_dir, settings.max_sample_age
    return sample.read_sample(folder, clock_boottime(), Node(settings).boot_id, oldest)


def check_quarantine_policy(settings: Settings) -> Iterator[Finding]:
    """Look whether what the settings name can be seen."""
    words = settings.quarantine_on if "QUARANTINE_ON" in settings.given else ()
    unseen = [word for word in words if word in POLICY_WORDS and word not in (MISSING, XID)]
    if unseen and read_current_sample(settings) is None:
        what = f"{' '.join(unseen)}: no exporter runs here, so nothing is detected"
        yield warning(what, "start gpulock-exporter")


def check_quarantined_devices(settings: Settings) -> Iterator[Finding]:
    """Tell what is out of service, why, and what brings it back."""
    for name, note in health.read_quarantine_notes(Node(settings)).items():
        reason, by = note.get("reason", "no reason noted"), note.get("by", "")
        back = quarantine_end_condition(f"{reason} ({by})") if by == POLICY else "an administrator"
        who = f" ({by})" if by else ""
        do = f"{back} brings it back; gpulock restore {name}"
        yield warning(f"{name} is out of service: {reason}{who}", do, "quarantine")


def check_card_checks(settings: Settings) -> Iterator[Finding]:
    """Tell what gpulockd found wrong with cards that work all the same."""
    node = Node(settings)
    for bus, card in sorted(read_card_checks(node.store.path, node.boot_id)[0].items()):
        for name, why in sorted(card.failed().items()):
            last = "; claims take it last" if name in SERIOUS else ""
            yield warning(f"{bus}: {why}{last}", "see docs/health.md", "checks")
        if settings.health_command and (why := card.unproven_words()):
            yield warning(f"{bus}: {why}", "see docs/health.md", "checks")


def check_health_command(settings: Settings) -> Iterator[Finding]:
    """Look whether gpulockd runs the command."""
    for program in settings.health_command[:1]:
        if why := check_program_trust(program):
            do = "name a program that root alone may write"
            yield fault(f"{program} is not run: {why}", do)


def check_slurm_drain(settings: Settings) -> Iterator[Finding]:
    """Report that gpulockd drained this node."""
    if drained := slurm.read_drained_devices(settings):
        yield warning(
            f"this node was drained at Slurm because of {drained}", "see docs/quarantine.md"
        )
