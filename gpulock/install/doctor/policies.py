# SPDX-License-Identifier: Apache-2.0
"""Doctor's checks of policies: quarantine, the drain at Slurm, what jobs leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpulock.daemon.health import policy as health
from gpulock.daemon.health.card_checks import SERIOUS
from gpulock.daemon.health.findings import MISSING, POLICY_WORDS
from gpulock.daemon.idle.command import check_program_trust
from gpulock.daemon.slots import slurm
from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import Check, fault, ok, run_all, warning
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.checks import read_card_checks
from gpulock.store.quarantine import POLICY
from gpulock.text.advice import quarantine_end_condition

SEE = "see docs/quarantine.md"


def policy_checks(settings: Settings) -> list[Check]:
    """Return the checks of quarantine and of the drain at Slurm."""
    return run_all(
        {
            "exporter": lambda: check_exporter_sample(settings),
            "quarantine": lambda: check_quarantine_policy(settings),
            "lost": lambda: check_lost_cards(settings),
            "checks": lambda: check_card_checks(settings),
            "out of service": lambda: check_quarantined_devices(settings),
            "drain": lambda: check_slurm_drain(settings),
        }
    )


def handover_checks(settings: Settings) -> list[Check]:
    """Return the checks of LEFTOVER_PROCESSES."""
    return run_all({"hand-over": lambda: check_leftover_setting(settings)})


def read_current_sample(settings: Settings) -> sample.Sample | None:
    """Return what the exporter says now, None where it says nothing."""
    folder, oldest = settings.exporter_dir, settings.max_sample_age
    return sample.read_sample(folder, clock_boottime(), Node(settings).boot_id, oldest)


def check_exporter_sample(settings: Settings) -> Iterator[Check]:
    """Tell that an exporter which wrote samples in this boot writes none any more."""
    path = f"{settings.exporter_dir}/{sample.SAMPLE}"
    last = sample.load_sample_file(path, sample.SAMPLE_LINE)
    if last is None or last.boot_id != Node(settings).boot_id or last.boottime is None:
        return
    if (age := clock_boottime() - last.boottime) > settings.max_sample_age:
        do = "start gpulock-exporter; journalctl -u gpulock-exporter says why it ended"
        yield warning(f"gpulock-exporter does not run: {path} is {age:.0f} s old", do)


def check_quarantine_policy(settings: Settings) -> Iterator[Check]:
    """Look whether what is set can work."""
    wanted = settings.quarantine_on
    if not wanted:
        yield ok("by hand alone (QUARANTINE_ON is empty)")
        return
    told = [word for word in wanted if word in POLICY_WORDS and word != MISSING]
    default = "" if "QUARANTINE_ON" in settings.given else " (the default)"
    if told and read_current_sample(settings) is None:
        if default:
            yield ok(f"on {' '.join(wanted)}{default}; without an exporter {MISSING} alone is seen")
            return
        what = f"{' '.join(told)}: no exporter runs here, so nothing is detected"
        yield warning(what, "start gpulock-exporter")
    else:
        back = f"back after {max(1, settings.restore_after)} clean checks where the cause allows"
        yield ok(f"on {' '.join(wanted)}{default}; {back}")


def check_quarantined_devices(settings: Settings) -> Iterator[Check]:
    """Tell what is out of service, why, and what brings it back."""
    for name, note in health.read_quarantine_notes(Node(settings)).items():
        reason, by = note.get("reason", "no reason noted"), note.get("by", "")
        back = quarantine_end_condition(f"{reason} ({by})") if by == POLICY else "an administrator"
        who = f" ({by})" if by else ""
        do = f"{back} brings it back; gpulock restore {name}"
        yield warning(f"{name} is out of service: {reason}{who}", do, "quarantine")


def check_lost_cards(settings: Settings) -> Iterator[Check]:
    """Tell which cards do not answer though the driver lists them."""
    found = read_current_sample(settings)
    for bus, (_, why) in sorted(found.lost.items() if found else ()):
        do = f"look at dmesg; gpulock quarantine {bus}, then gpulock reset {bus}"
        yield warning(f"{bus} does not answer: {why}; claims take it last", do, "lost")


def check_card_checks(settings: Settings) -> Iterator[Check]:
    """Tell what gpulockd found wrong with cards that work all the same."""
    node = Node(settings)
    for bus, card in sorted(read_card_checks(node.store.path, node.boot_id)[0].items()):
        for name, why in sorted(card.failed().items()):
            last = "; claims take it last" if name in SERIOUS else ""
            yield warning(f"{bus}: {why}{last}", "see docs/health.md", "checks")
        if settings.health_command and (why := card.unproven_words()):
            yield warning(f"{bus}: {why}", "see docs/health.md", "checks")
    if words := settings.health_command:
        if why := check_program_trust(words[0]):
            do = "name a program that root alone may write"
            yield fault(f"HEALTH_COMMAND {words[0]} is not run: {why}", do)
        else:
            yield ok(f"HEALTH_COMMAND {words[0]}, on each free GPU")


def check_slurm_drain(settings: Settings) -> Iterator[Check]:
    """Report that gpulockd drained this node."""
    if drained := slurm.read_drained_devices(settings):
        yield warning(f"this node was drained at Slurm because of {drained}", SEE)


def check_leftover_setting(settings: Settings) -> Iterator[Check]:
    """Look at what LEFTOVER_PROCESSES is, and at what it needs."""
    key = f"LEFTOVER_PROCESSES={settings.leftover_processes}"
    if settings.leftover_processes == "off":
        yield ok(f"{key}: a lock waits for what its job left behind")
        return
    if settings.leftover_processes == "kill" and (why := why_pidfd_unusable()):
        yield fault(f"{key} ends nothing here: {why}", "set LEFTOVER_PROCESSES=report")
    else:
        yield ok(key)


def why_pidfd_unusable() -> str:
    """Return why this kernel cannot send a signal that surely reaches the process meant."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as refused:
        return f"pidfd_open: {refused.strerror} (Linux 5.3 has it)"
    return ""
