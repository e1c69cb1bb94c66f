# SPDX-License-Identifier: Apache-2.0
"""What doctor says of CLEAN: whether this node can end what a job left, and see its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import Check, fault_check, ok_check, run_checks, warning_check
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.settings import Settings

NAME = "hand-over"
SEE = "see docs/hand-over.md"


def handover_checks(settings: Settings) -> list[Check]:
    """Return the checks of CLEAN."""
    return run_checks(NAME, lambda: check_clean_setting(settings))


def check_clean_setting(settings: Settings) -> Iterator[Check]:
    """Look at what is set, and at what it needs."""
    if settings.clean == "off":
        yield ok_check(NAME, "CLEAN=off: a lock waits for what its job left behind")
        return
    if settings.clean == "kill" and (why := why_pidfd_unusable()):
        yield fault_check(NAME, f"CLEAN=kill ends nothing here: {why}", "set CLEAN=report")
    if is_memory_reported(settings):
        yield ok_check(NAME, f"CLEAN={settings.clean}, and the exporter tells each device's memory")
    else:
        yield warning_check(
            NAME,
            f"CLEAN={settings.clean}, but no exporter tells here whether memory is given back",
            f"start gpulock-exporter; {SEE}",
        )


def why_pidfd_unusable() -> str:
    """Return why this kernel cannot send a signal that surely reaches the process meant."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as refused:
        return f"pidfd_open: {refused.strerror} (Linux 5.3 has it)"
    return ""


def is_memory_reported(settings: Settings) -> bool:
    """Return whether a fresh sample tells the memory of any device."""
    node = Node(settings)
    folder, oldest = settings.exporter_dir, settings.max_sample_age
    found = sample.read_sample(folder, clock_boottime(), node.boot_id, oldest)
    return found is not None and any(d.memory_used is not None for d in found.devices.values())
