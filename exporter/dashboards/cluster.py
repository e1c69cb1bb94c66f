# SPDX-License-Identifier: Apache-2.0
"""The view of all nodes: what is free, who has what, and what is held for nothing."""

from __future__ import annotations

from typing import Any

from dashboards import boards, shares
from dashboards.node import IDLE_AFTER, LONG, OUT_OF_ORDER, OUT_OF_ORDER_MEANS
from dashboards.panels import RED, YELLOW, Column, Query, bars, lines, number, rows, stacked

HERE = '{cluster=~"$cluster"}'
WORST = 20


def cluster() -> dict[str, Any]:
    """Return the dashboard."""
    return boards.board(
        "gpulock-cluster",
        "gpulock: all nodes",
        "What is free, who has what, what is held and idle, and what is broken.",
        [
            boards.choice(
                "cluster", "cluster", "label_values(gpulock_gpus, cluster)", everything=True
            )
        ],
        [
            ("At a glance", GLANCE),
            ("Held and idle", IDLE),
            ("Over time", TIME),
            ("Shares", SHARES),
        ],
    )


def state(name: str) -> str:
    """Return how many devices are in one of the states that a pattern names."""
    return f'sum(gpulock:cluster:gpus:sum{{cluster=~"$cluster",state=~"{name}"}})'


DRIVERS = (
    "count by (driver_version)"
    f" (group by (cluster, instance, driver_version) (gpulock_gpu_info{HERE}))"
)

GLANCE = [
    number("Nodes", "none", Query(f"count(gpulock_exporter_build_info{HERE})")),
    number("GPUs", "none", Query(state(".+"))),
    number("Free", "none", Query(state("free"))),
    number("Held", "none", Query(state("held|held_idle"))),
    number("Held-idle", "none", Query(state("held_idle")), steps=[(1, YELLOW)]),
    number(
        "Out of order",
        "none",
        Query(state(OUT_OF_ORDER)),
        steps=[(1, RED)],
        about=OUT_OF_ORDER_MEANS,
    ),
    rows(
        "Models",
        ("name", "profile"),
        [
            Column(f"gpulock:model:gpus:count{HERE}", "GPUs"),
            Column(f"gpulock:model:gpus_held:count{HERE}", "held"),
            Column(f"gpulock:model:gpus_idle:count{HERE}", "held-idle"),
        ],
        height=6,
    ),
    bars(
        "Nodes by free GPUs",
        "none",
        Query(
            'count_values("free", gpulock_gpus{cluster=~"$cluster",state="free"})',
            "{{free}} free",
        ),
        about="A job of eight GPUs needs a node with eight free ones.",
    ),
    bars("Nodes by driver", "none", Query(DRIVERS, "{{driver_version}}")),
    bars(
        "Nodes by version of gpulock",
        "none",
        Query(f"count by (version) (gpulock_exporter_build_info{HERE})", "{{version}}"),
    ),
]

IDLE = [
    bars(
        "Held and idle for, the longest",
        "s",
        Query(
            f"topk({WORST}, ({shares.idle_holds(HERE)}) >= {IDLE_AFTER})",
            "{{instance}} GPU {{gpu}}: {{user}} {{job_id}}",
        ),
        steps=[(IDLE_AFTER, YELLOW), (LONG, RED)],
    ),
    lines("Held-idle, by user", "none", Query(f"gpulock:user:gpus_idle:count{HERE}", "{{user}}")),
    rows(
        "Users",
        ("user",),
        [
            Column(f"gpulock:user:gpus:count{HERE}", "GPUs"),
            Column(f"count by (cluster, user) (gpulock_gpu_share_info{HERE})", "shares"),
            Column(f"gpulock:user:gpus_idle:count{HERE}", "held-idle"),
            Column(f"gpulock:user:power_watts:sum{HERE}", "power", "watt"),
        ],
    ),
    rows(
        "Alerts",
        ("instance", "gpu", "alertname", "severity", "job_id", "user"),
        [Column('ALERTS{alertname=~"Gpulock.*",alertstate="firing"}')],
    ),
]

TIME = [
    stacked("States", "none", Query(f"gpulock:cluster:gpus:sum{HERE} > 0", "{{state}}")),
    stacked("GPUs by user", "none", Query(f"gpulock:user:gpus:count{HERE}", "{{user}}")),
    lines("Power by user", "watt", Query(f"gpulock:user:power_watts:sum{HERE}", "{{user}}")),
    lines(
        "Utilisation of what is held",
        "percentunit",
        Query(
            f"sum by (user) (rate(gpulock:gpu_hold:busy_seconds_total{HERE}[$__rate_interval]))"
            f" / sum by (user) (rate(gpulock:gpu_hold:observed_seconds_total{HERE}"
            "[$__rate_interval]))",
            "{{user}}",
        ),
        top=1,
    ),
]

SHARES = [
    number("Places", "none", Query(f"sum(gpulock_gpu_share_places{HERE})")),
    number("Places held", "none", Query(f"count(gpulock_gpu_share_info{HERE})")),
    stacked(
        "Shared GPUs by user",
        "none",
        Query(f"sum by (user) (gpulock:share_hold:ratio{HERE})", "{{user}}"),
        about="A place is its part of the GPU.",
    ),
]
