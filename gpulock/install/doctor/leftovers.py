# SPDX-License-Identifier: Apache-2.0
"""Doctor's checks of LEFTOVER_PROCESSES: can this node end leftovers, and see their memory?"""

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
    """Return the checks of LEFTOVER_PROCESSES."""
    return run_checks(NAME, lambda: check_clean_setting(settings))


def check_clean_setting(settings: Settings) -> Iterator[Check]:
    """Look at what is set, and at what it needs."""
    mode = settings.leftover_processes
    if mode == "off":
        yield ok_check(NAME, "LEFTOVER_PROCESSES=off: a lock waits for what its job left behind")
        return
    if mode == "kill" and (why := why_pidfd_unusable()):
        yield fault_check(
            NAME,
            f"LEFTOVER_PROCESSES=kill ends nothing here: {why}",
            "set LEFTOVER_PROCESSES=report",
        )
    if is_memory_reported(settings):
        yield ok_check(NAME, f"LEFTOVER_PROCESSES={mode}, and the exporter reports device memory")
    else:
        yield warning_check(
            NAME,
            f"LEFTOVER_PROCESSES={mode}, but no exporter reports device memory here",
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
