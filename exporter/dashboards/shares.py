# SPDX-License-Identifier: Apache-2.0
"""What the views show of GPUs that several jobs share: places, holders, and the work of each."""

from __future__ import annotations

from dashboards.panels import Column, Panel, Query, lines, rows

CARD = ("instance", "gpu", "uuid")
HOLDER = ("gpu", "user", "job_id", "task_id")
NOT_TOLD = "Told apart by processes; nothing where that cannot be."


def idle_holds(where: str) -> str:
    """Return how long each GPU, and each share of one, has been idle for its holder."""
    return f"gpulock:gpu_hold:idle_seconds{where} or gpulock:share_hold:idle_seconds{where}"


def places(where: str) -> Panel:
    """Return a table of the GPUs that give out places: how many of them are held, and the use."""
    by_card = f"by ({', '.join(CARD)})"
    given = f"gpulock_gpu_share_places{where}"
    held = f"gpulock_gpu_share_info{where}"
    shared = f"and on (instance, uuid) ({given} or {held})"
    return rows(
        "Shared GPUs",
        CARD[1:],
        [
            Column(given, "places"),
            Column(f"count {by_card} ({held}) or on (instance, uuid) {given} * 0", "held"),
            Column(f"sum {by_card} (gpulock_gpu_share_ratio{where})", "part held", "percentunit"),
            Column(f"gpulock_gpu_utilization_ratio{where} {shared}", "use", "percentunit"),
            Column(f"gpulock_gpu_memory_used_bytes{where} {shared}", "memory", "bytes"),
        ],
        about="A place is the part of the GPU that SHARES said when it was claimed. Nobody knows "
        "the part of one that only Slurm counts.",
    )


def holders(where: str, title: str = "Holders", key: tuple[str, ...] = HOLDER) -> Panel:
    """Return a table of who shares a GPU: places, their part of the GPU, work and memory."""
    by_holder = f"by ({', '.join(key)})"
    return rows(
        title,
        key,
        [
            Column(f"count {by_holder} (gpulock_gpu_share_info{where})", "places"),
            Column(f"sum {by_holder} (gpulock:share_hold:ratio{where})", "part", "percentunit"),
            Column(f"gpulock:share_hold:utilization_ratio{where}", "work", "percentunit"),
            Column(f"max {by_holder} (gpulock:share_hold:idle_seconds{where})", "idle for", "s"),
            Column(f"gpulock:share_hold:memory_used_bytes{where}", "memory", "bytes"),
        ],
        about=NOT_TOLD,
    )


def work(where: str, legend: str) -> list[Panel]:
    """Return what each holder of a share does over time."""
    return [
        lines(
            "Work of each holder",
            "percentunit",
            Query(f"gpulock:share_hold:utilization_ratio{where}", legend),
            about=f"Share of time at work, at the last sample. {NOT_TOLD}",
            top=1,
        ),
        lines(
            "Memory of each holder",
            "bytes",
            Query(f"gpulock:share_hold:memory_used_bytes{where}", legend),
            about=NOT_TOLD,
        ),
    ]
