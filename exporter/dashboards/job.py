# SPDX-License-Identifier: Apache-2.0
"""The view of a job: all its GPUs on all its nodes, how well it uses them, what they took."""

from __future__ import annotations

from typing import Any

from dashboards import boards, shares
from dashboards.node import IDLE_AFTER, LONG
from dashboards.panels import RED, YELLOW, Column, Query, bars, lines, number, rows

JOB = '{scheduler=~"$scheduler",job_id="$job_id",task_id=~"$task_id"}'
GPU = "{{instance}} GPU {{gpu}}"
LOCKS = '{__name__=~"gpulock_gpu_(lock|share)_info"%s}'


def job() -> dict[str, Any]:
    """Return the dashboard."""
    chosen = ',scheduler=~"$scheduler"'
    of_user = f'{chosen},user=~"$user"'
    of_job = f'{chosen},job_id="$job_id"'
    return boards.board(
        "gpulock-job",
        "gpulock: job",
        "All GPUs of a job on all its nodes: how well it uses them, and what they took.",
        [
            boards.choice("scheduler", "scheduler", values("scheduler", ""), everything=True),
            boards.choice("user", "user", values("user", chosen), everything=True),
            boards.choice("job_id", "job", values("job_id", of_user)),
            boards.choice("task_id", "task", values("task_id", of_job), everything=True),
        ],
        [
            ("At a glance", GLANCE),
            ("Over time", TIME),
            ("Inside (Hopper and later)", INSIDE),
            ("Shares", [shares.holders(JOB, "Shared GPUs", shares.CARD), *shares.work(JOB, GPU)]),
        ],
    )


def values(label: str, chosen: str) -> str:
    """Return how Grafana is asked for the values of a label of locks."""
    return f"label_values({LOCKS % chosen}, {label})"


def while_held(series: str) -> str:
    """Return what a GPU does, as long as the job holds it."""
    held = f"gpulock:gpu_hold:info{JOB}"
    return f"{series} * on (instance, uuid) group_left (job_id, task_id) {held}"


def mean_use(window: str) -> str:
    """Return which part of the observed time the job's GPUs were at work, shares at samples."""
    busy, observed = (
        f"sum(increase(gpulock:gpu_hold:{name}_seconds_total{JOB}[{window}]))"
        for name in ("busy", "observed")
    )
    of_shares = f"avg(avg_over_time(gpulock:share_hold:utilization_ratio{JOB}[{window}]))"
    return f"{busy} / {observed} or {of_shares}"


def counted(name: str) -> str:
    """Return how fast a counter of the job's devices grows."""
    return f"rate(gpulock:gpu_hold:{name}_seconds_total{JOB}[$__rate_interval])"


HOLD_USE = f"{counted('busy')} / {counted('observed')}"

GLANCE = [
    number("GPUs now", "none", Query(f"sum(gpulock:job:gpus:count{JOB})")),
    number(
        "Idle now",
        "none",
        Query(f"sum(gpulock:job:gpus_idle:count{JOB})"),
        steps=[(1, YELLOW)],
    ),
    number(
        "At work",
        "percentunit",
        Query(mean_use("$__range")),
        about="Share of the observed time, in the time that is shown. Of shares no time is "
        "counted: theirs is the mean of samples.",
    ),
    number(
        "GPU hours",
        "none",
        Query(f"sum(sum_over_time(gpulock:job:gpus:count{JOB}[$__range:15s])) / 240"),
        about="In the time that is shown. A share is its part of the GPU.",
    ),
    number(
        "Energy",
        "joule",
        Query(f"sum(increase(gpulock:gpu_hold:energy_joules_total{JOB}[$__range]))"),
        about="Energy of its boards while it held them, in the time that is shown. Not known of "
        "MIG instances and of cards without a counter.",
    ),
    number(
        "Foreign processes",
        "none",
        Query(f"sum({while_held('gpulock_gpu_foreign_processes')})"),
        steps=[(1, RED)],
    ),
    rows(
        "GPUs",
        ("instance", "gpu", "uuid"),
        [
            Column(f"gpulock:gpu_hold:info{JOB}", labels=("job_id", "task_id", "user", "queue")),
            Column(f"gpulock:gpu_hold:utilization_ratio{JOB}", "use", "percentunit"),
            Column(f"gpulock:gpu_hold:memory_used_bytes{JOB}", "memory", "bytes"),
            Column(f"gpulock:gpu_hold:idle_seconds{JOB}", "idle for", "s"),
            Column(f"gpulock:gpu_hold:power_watts{JOB}", "power", "watt"),
        ],
    ),
]

TIME = [
    lines(
        "Utilisation",
        "percentunit",
        Query(HOLD_USE, GPU),
        about="From counters: nothing between two scrapes is missed.",
        top=1,
    ),
    bars(
        "Held and idle for",
        "s",
        Query(shares.idle_holds(JOB), GPU),
        steps=[(IDLE_AFTER, YELLOW), (LONG, RED)],
        about="How long each GPU has been idle for its job. Time in which it was not observed "
        "does not count.",
    ),
    lines("Memory used", "bytes", Query(f"gpulock:gpu_hold:memory_used_bytes{JOB}", GPU)),
    lines("Power", "watt", Query(f"gpulock:gpu_hold:power_watts{JOB}", GPU)),
    lines(
        "Clocks kept down by",
        "percentunit",
        Query(
            while_held(
                'rate(gpulock_gpu_clock_event_seconds_total{reason!="gpu_idle"}[$__rate_interval])'
            ),
            GPU + ": {{reason}}",
        ),
        top=1,
    ),
]

INSIDE = [
    lines(title, "percentunit", Query(while_held(f"gpulock_gpu_{name}_ratio"), GPU), top=1)
    for title, name in (("Multiprocessors at work", "sm_active"), ("Tensor cores", "tensor_active"))
]
