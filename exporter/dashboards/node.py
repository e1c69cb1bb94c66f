# SPDX-License-Identifier: Apache-2.0
"""The view of a node: what each of its GPUs does, for whom, and what is wrong with it."""

from __future__ import annotations

from typing import Any

from dashboards import boards, shares
from dashboards.panels import (
    QUARTER,
    RED,
    YELLOW,
    Column,
    Query,
    bars,
    lines,
    number,
    rows,
    stacked,
)

HERE = '{instance="$instance"}'
GPU = "GPU {{gpu}}"
HOLD = "GPU {{gpu}}: {{user}} {{job_id}}"
DEVICE = ("gpu", "uuid")
OWNER = ("job_id", "task_id", "user", "queue")
IDLE_AFTER, LONG = 600, 3600  # seconds
OUT_OF_ORDER = "missing|quarantined|stale|unknown|foreign"
OUT_OF_ORDER_MEANS = (
    "Missing, quarantined, stale, used without a lock, or held by an owner whose state is unknown."
)


XIDS = f"gpulock_gpu_xid_errors_total{HERE}"
XID_AGE = (
    "gpulock_sample_timestamp_seconds - on (instance) group_right () "
    f"gpulock_gpu_xid_last_timestamp_seconds{HERE}"
)
# Of a new series `increase` misses the first event. Without one an hour ago (or with a higher one,
# of the boot before) all are counted, where the last of them is of this hour.
XIDS_IN_AN_HOUR = (
    f"{XIDS} - (({XIDS} offset 1h <= {XIDS}) or {XIDS} * 0)"
    f" and on (instance, uuid, xid) ({XID_AGE} < 3600)"
)


XID_ANNOTATION = boards.annotation(
    "XID errors",
    f"gpulock_gpu_xid_last_timestamp_seconds{HERE} * 1000",
    "GPU {{gpu}}: XID {{xid}}",
)


def counted(name: str) -> str:
    """Return how fast a counter of the node's devices grows."""
    return f"rate(gpulock_gpu_{name}_seconds_total{HERE}[$__rate_interval])"


def node() -> dict[str, Any]:
    """Return the dashboard."""
    return boards.board(
        "gpulock-node",
        "gpulock: node",
        "What each GPU of a node does, for whom, and what is wrong with it.",
        [boards.choice("instance", "node", "label_values(gpulock_exporter_build_info, instance)")],
        [
            ("At a glance", GLANCE),
            ("Work", WORK),
            ("Board", BOARD),
            ("Inside (Hopper and later)", INSIDE),
            ("Faults", FAULTS),
            ("Shares", [shares.places(HERE), shares.holders(HERE), *shares.work(HERE, HOLD)]),
            ("Locks and exporter", OWN),
        ],
        [XID_ANNOTATION],
    )


GLANCE = [
    number("Free", "none", Query('gpulock_gpus{instance="$instance",state="free"}')),
    number(
        "Held",
        "none",
        Query('sum(gpulock_gpus{instance="$instance",state=~"held|held_idle"})'),
    ),
    number(
        "Held-idle",
        "none",
        Query('gpulock_gpus{instance="$instance",state="held_idle"}'),
        steps=[(1, YELLOW)],
    ),
    number(
        "Out of order",
        "none",
        Query(f'sum(gpulock_gpus{{instance="$instance",state=~"{OUT_OF_ORDER}"}})'),
        steps=[(1, RED)],
        about=OUT_OF_ORDER_MEANS,
    ),
    number(
        "Foreign processes",
        "none",
        Query(f"sum(gpulock_gpu_foreign_processes{HERE})"),
        steps=[(1, RED)],
    ),
    number(
        "Age of the values",
        "s",
        Query(f"time() - gpulock_sample_timestamp_seconds{HERE}"),
        steps=[(30, YELLOW), (120, RED)],
    ),
    rows(
        "GPUs",
        DEVICE,
        [
            Column(f"gpulock_gpu_info{HERE}", labels=("name", "profile")),
            Column(f"gpulock:gpu_hold:info{HERE}", labels=OWNER),
            Column(f"gpulock_gpu_utilization_ratio{HERE}", "use", "percentunit"),
            Column(f"gpulock_gpu_memory_used_bytes{HERE}", "memory", "bytes"),
            Column(f"gpulock:gpu_hold:idle_seconds{HERE}", "idle for", "s"),
            Column(f"gpulock_gpu_temperature_celsius{HERE}", "temperature", "celsius"),
            Column(f"gpulock_gpu_power_watts{HERE}", "power", "watt"),
        ],
        height=10,
    ),
]

WORK = [
    lines(
        "Utilisation",
        "percentunit",
        Query(f"{counted('busy')} / {counted('observed')}", GPU),
        about="From counters: nothing between two scrapes is missed.",
        top=1,
    ),
    lines(
        "Held and idle for",
        "s",
        Query(shares.idle_holds(HERE), HOLD),
        about="How long a held GPU has been idle. Time in which it was not "
        "observed does not count; a MIG instance without GPM is not here.",
    ),
    lines("Memory used", "bytes", Query(f"gpulock_gpu_memory_used_bytes{HERE}", GPU)),
    stacked(
        "States",
        "none",
        Query(f"gpulock_gpus{HERE} > 0", "{{state}}"),
        about="As `gpulock status` shows them.",
    ),
]

BOARD = [
    lines(
        "Power",
        "watt",
        Query(f"gpulock_gpu_power_watts{HERE}", GPU),
        Query(f"gpulock_gpu_power_limit_enforced_watts{HERE}", f"{GPU} limit"),
    ),
    lines(
        "Temperature",
        "celsius",
        Query(f"gpulock_gpu_temperature_celsius{HERE}", GPU),
        Query(f"gpulock_gpu_memory_temperature_celsius{HERE}", f"{GPU} memory"),
    ),
    lines("Clock of the multiprocessors", "hertz", Query(f"gpulock_gpu_sm_clock_hertz{HERE}", GPU)),
    lines(
        "Clocks kept down by",
        "percentunit",
        Query(
            'rate(gpulock_gpu_clock_event_seconds_total{instance="$instance",reason!="gpu_idle"}'
            "[$__rate_interval])",
            "GPU {{gpu}}: {{reason}}",
        ),
        top=1,
    ),
    lines(
        "PCIe",
        "Bps",
        Query(f"rate(gpulock_gpu_pcie_transmit_bytes_total{HERE}[$__rate_interval])", f"{GPU} out"),
        Query(f"rate(gpulock_gpu_pcie_receive_bytes_total{HERE}[$__rate_interval])", f"{GPU} in"),
    ),
    lines(
        "NVLink",
        "Bps",
        Query(
            f"rate(gpulock_gpu_nvlink_transmit_bytes_total{HERE}[$__rate_interval])", f"{GPU} out"
        ),
        Query(f"rate(gpulock_gpu_nvlink_receive_bytes_total{HERE}[$__rate_interval])", f"{GPU} in"),
    ),
    lines(
        "Memory read or written",
        "percentunit",
        Query(f"gpulock_gpu_memory_utilization_ratio{HERE}", GPU),
        about="Share of time in which memory was read or written, at the last sample.",
        top=1,
    ),
    lines("Fan", "percentunit", Query(f"gpulock_gpu_fan_ratio{HERE}", GPU), top=1),
]

INSIDE = [
    lines(title, "percentunit", Query(f"gpulock_gpu_{name}_ratio{HERE}", GPU), width=QUARTER, top=1)
    for title, name in (
        ("Multiprocessors at work", "sm_active"),
        ("Warps resident", "sm_occupancy"),
        ("Tensor cores", "tensor_active"),
        ("Memory bandwidth", "dram_active"),
    )
]

FAULTS = [
    lines(
        "XID errors in an hour",
        "none",
        Query(XIDS_IN_AN_HOUR, "GPU {{gpu}}: XID {{xid}}"),
    ),
    lines(
        "Memory errors in an hour",
        "none",
        Query(
            f"increase(gpulock_gpu_ecc_errors_total{HERE}[1h])",
            "GPU {{gpu}}: {{type}} {{location}}",
        ),
    ),
    lines("Foreign processes", "none", Query(f"gpulock_gpu_foreign_processes{HERE}", GPU)),
    lines(
        "Rows and resets",
        "none",
        Query(f"gpulock_gpu_remapped_rows{HERE}", "GPU {{gpu}}: remapped, {{cause}}"),
        Query(f"gpulock_gpu_remapped_rows_pending{HERE}", "GPU {{gpu}}: to be remapped"),
        Query(f"gpulock_gpu_remapped_rows_failure{HERE}", "GPU {{gpu}}: not remapped"),
    ),
    stacked(
        "Checks that fail",
        "none",
        Query(f"(gpulock_gpu_health{HERE} == 0) + 1", "GPU {{gpu}}: {{check}}"),
        about="What gpulockd's last look found wrong; `gpulock why` has the evidence.",
    ),
    stacked(
        "Out of service",
        "none",
        Query(f"gpulock_gpu_quarantine_info{HERE}", "GPU {{gpu}}: {{cause}}"),
        about="Why; `gpulock history --health` has each step.",
    ),
    lines(
        "Errors on links in an hour",
        "none",
        Query(f"increase(gpulock_gpu_pcie_replays_total{HERE}[1h])", "GPU {{gpu}}: PCIe replays"),
        Query(
            f"increase(gpulock_gpu_nvlink_errors_total{HERE}[1h])", "GPU {{gpu}}: NVLink {{kind}}"
        ),
    ),
    lines(
        "Links",
        "none",
        Query(f"gpulock_gpu_pcie_width_lanes{HERE}", "GPU {{gpu}}: PCIe lanes"),
        Query(f"gpulock_gpu_pcie_generation{HERE}", "GPU {{gpu}}: PCIe generation"),
        Query(f"gpulock_gpu_nvlink_active_links{HERE}", "GPU {{gpu}}: NVLinks"),
        about="An idle GPU lowers the generation of its PCIe link.",
    ),
    lines(
        "Answer of the driver",
        "s",
        Query(f"gpulock_gpu_driver_answer_seconds{HERE}", GPU),
        about="How long the driver took for each GPU at the last sample.",
    ),
]

OWN = [
    bars(
        "Idle now, by holder",
        "s",
        Query(shares.idle_holds(HERE), HOLD),
        steps=[(IDLE_AFTER, YELLOW), (LONG, RED)],
    ),
    lines(
        "Claims in ten minutes",
        "none",
        Query(f"increase(gpulock_claims_total{HERE}[10m])", "{{result}}"),
    ),
    lines(
        "Parts of a sample",
        "s",
        Query(f"gpulock_collector_duration_seconds{HERE}", "{{collector}}"),
        about="How long each took at the last sample.",
    ),
    lines(
        "Since the last look",
        "s",
        Query(f"time() - gpulock_sample_timestamp_seconds{HERE}", "at the driver"),
        Query(f"time() - gpulock_reconcile_timestamp_seconds{HERE}", "at the owners of locks"),
    ),
]
