# SPDX-License-Identifier: Apache-2.0
"""The AdminComment that jobstats, reportseff and jobscope read: `JS1:`, base64, gzip, JSON; pure.

Format of PrincetonUniversity/jobstats 1.0: nodes, by name, each with cpus, total_time (CPU
seconds), total_memory, used_memory (bytes), and by minor number gpu_total_memory, gpu_used_memory
(bytes), gpu_utilization (percent); then total_time (seconds that the job ran) and gpus. What is
not known is left out: jobstats then shows no CPU or memory, reportseff neither (docs/reports.md).
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any, Final

from gpulock.report.claims import ReportedClaim, ReportedDevice

PREFIX: Final = "JS1:"
SHORT, NONE = "JS1:Short", "JS1:None"
LEAST: Final = 2.0  # seconds: two samples of ours
PERCENT: Final = 100


def make_jobstats_comment(claims: Sequence[ReportedClaim]) -> str:
    """Return the comment of a job's run: its claims, one a node."""
    held = max([claim.held for claim in claims], default=0.0)
    nodes = {claim.node: jobstats_node(claim) for claim in claims}
    nodes = {name: node for name, node in nodes.items() if node is not None}
    if not nodes:
        return SHORT if claims and held < LEAST else NONE
    gpus = sum(len(claim.cards) for claim in claims)
    whole = {"nodes": nodes, "total_time": max(1, round(held)), "gpus": gpus}
    data = json.dumps(whole, separators=(",", ":"), sort_keys=True).encode()
    return PREFIX + base64.b64encode(gzip.compress(data, mtime=0)).decode()


def jobstats_node(claim: ReportedClaim) -> dict[str, Any] | None:
    """Return one node, None where nothing was observed there."""
    cards = [card for card in claim.cards if card.utilization is not None and card.memory]
    if not cards:
        return None
    return {
        **jobstats_host(claim),
        "gpu_total_memory": {jobstats_minor(card): card.memory for card in cards},
        "gpu_used_memory": {jobstats_minor(card): card.memory_peak or 0 for card in cards},
        "gpu_utilization": {
            jobstats_minor(card): round((card.utilization or 0.0) * PERCENT, 1) for card in cards
        },
    }


def jobstats_host(claim: ReportedClaim) -> dict[str, float]:
    """Return what a job used of a host; its readers divide a use by the size beside it."""
    found: dict[str, float] = {}
    if claim.cpus and claim.cpu_seconds is not None:
        most = claim.cpus * max(1.0, claim.held)
        found |= {"cpus": claim.cpus, "total_time": round(min(claim.cpu_seconds, most), 1)}
    if claim.host_memory and claim.host_memory_peak is not None:
        used = min(claim.host_memory_peak, claim.host_memory)
        found |= {"total_memory": claim.host_memory, "used_memory": used}
    return found


def jobstats_minor(card: ReportedDevice) -> str:
    """Return the minor number, of an instance with its own."""
    number = card.minor if card.minor is not None else card.index
    instance = card.id.partition(".gi")[2].partition(".")[0]
    name = str(number) if number is not None else card.id
    return f"{name}.{instance}" if instance else name
