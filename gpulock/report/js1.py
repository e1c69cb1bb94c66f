# SPDX-License-Identifier: Apache-2.0
"""The AdminComment that jobstats, reportseff and jobscope read: `JS1:`, base64, gzip, JSON; pure.

Format of PrincetonUniversity/jobstats 1.0: nodes, by name, each with cpus, total_time (CPU
seconds), total_memory, used_memory (bytes), and by minor number gpu_total_memory, gpu_used_memory
(bytes), gpu_utilization (percent); then total_time (seconds that the job ran) and gpus. Its
readers divide by cpus, total_memory and total_time and fail where a node lacks one, so an
unknown size of the host is 1, and an unknown use is 0.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulock.report.claims import ReportedClaim, ReportedDevice

PREFIX: Final = "JS1:"
SHORT, NONE = "JS1:Short", "JS1:None"
LEAST: Final = 2.0  # seconds: two samples of ours
PERCENT: Final = 100


@dataclass(frozen=True)
class HostUsage:
    """What a node did besides its GPUs: cores, CPU seconds, bytes granted and used."""

    cpus: int = 1
    cpu_seconds: float = 0.0
    memory: int = 1
    memory_used: int = 0


def make_jobstats_comment(claims: Sequence[ReportedClaim], host: HostUsage = HostUsage()) -> str:
    """Return the comment of a job's run: its claims, one a node; `host` is of each node."""
    held = max([claim.held for claim in claims], default=0.0)
    nodes = {claim.node: jobstats_node(claim, host) for claim in claims}
    nodes = {name: node for name, node in nodes.items() if node is not None}
    if not nodes:
        return SHORT if claims and held < LEAST else NONE
    gpus = sum(len(claim.cards) for claim in claims)
    whole = {"nodes": nodes, "total_time": max(1, round(held)), "gpus": gpus}
    data = json.dumps(whole, separators=(",", ":"), sort_keys=True).encode()
    return PREFIX + base64.b64encode(gzip.compress(data, mtime=0)).decode()


def jobstats_node(claim: ReportedClaim, host: HostUsage) -> dict[str, Any] | None:
    """Return one node, None where nothing was observed there."""
    cards = [card for card in claim.cards if card.utilization is not None and card.memory]
    if not cards:
        return None
    return {
        "cpus": max(1, host.cpus),
        "total_time": host.cpu_seconds,
        "total_memory": max(1, host.memory),
        "used_memory": host.memory_used,
        "gpu_total_memory": {jobstats_minor(card): card.memory for card in cards},
        "gpu_used_memory": {jobstats_minor(card): card.memory_peak or 0 for card in cards},
        "gpu_utilization": {
            jobstats_minor(card): round((card.utilization or 0.0) * PERCENT, 1) for card in cards
        },
    }


def jobstats_minor(card: ReportedDevice) -> str:
    """Return the minor number, of an instance with its own."""
    number = card.minor if card.minor is not None else card.index
    instance = card.id.partition(".gi")[2].partition(".")[0]
    name = str(number) if number is not None else card.id
    return f"{name}.{instance}" if instance else name
