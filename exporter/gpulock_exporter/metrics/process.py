# SPDX-License-Identifier: Apache-2.0
"""The families `process_*` of this process, as every client of Prometheus names them."""

from __future__ import annotations

import os
import resource
import time

from gpulock.deadline import clock_boottime
from gpulock.node.procfs import Proc, parse_stat
from gpulock_exporter.metrics.families import Family

STARTED = parse_stat(Proc("/proc").read(os.getpid(), "stat")).start / os.sysconf("SC_CLK_TCK")
STARTED_AT = round(time.time() - clock_boottime() + STARTED, 2)  # the same in each scrape


def collect_process_families() -> list[Family]:
    """Return what this process uses of its host."""
    with open("/proc/self/statm", "rb") as file:
        pages = [int(word) * resource.getpagesize() for word in file.read().split()[:2]]
    used = resource.getrusage(resource.RUSAGE_SELF)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = (
        ("virtual_memory_bytes", "Virtual memory size in bytes.", pages[0]),
        ("resident_memory_bytes", "Resident memory size in bytes.", pages[1]),
        (
            "start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            STARTED_AT,
        ),
        ("cpu_seconds_total", "Processor time of user and system.", used.ru_utime + used.ru_stime),
        ("open_fds", "Number of open file descriptors.", len(os.listdir("/proc/self/fd"))),
        ("max_fds", "Maximum number of open file descriptors.", most),
    )
    return [Family(f"process_{name}", meaning, [("", value)]) for name, meaning, value in values]
