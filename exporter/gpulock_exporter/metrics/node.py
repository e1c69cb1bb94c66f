# SPDX-License-Identifier: Apache-2.0
"""The node as a whole: how many devices are in each state, and what the hooks have counted."""

from __future__ import annotations

import math

from gpulock_exporter.metrics.families import Metric, counter, gauge, labels
from gpulock_exporter.state.snapshot import NodeSnapshot

GPUS = gauge("gpus", "Devices in each state; together as many as are expected.")
RECONCILED = gauge(
    "reconcile_timestamp_seconds", "When the owners of all locks were last looked at."
)
REAPED = counter("locks_reaped", "Locks that were freed because their owner was proven dead.")
CLAIMS = counter("claims", "Claims by how they ended, in this boot.")
WAITED = counter("lock_wait_seconds", "Time that claims waited for the gate, in this boot.")

REAPED_KEY, CLAIMS_KEY = "reaped_", "claims_"  # of gpulock.store.counters
TIMEOUTS_KEY, WAITED_KEY = "lock_timeouts", "lock_wait_seconds"
LOCK_TIMEOUT = "lock_timeout"  # the result of a claim that never got in


def collect_node_families(snapshot: NodeSnapshot) -> list[Metric]:
    """Return the families of the node."""
    states, reaped, claims = Metric(GPUS), Metric(REAPED), Metric(CLAIMS)
    for name, count in (snapshot.states or {}).items():
        states.values[labels([("state", name)])] = count
    for key, text in snapshot.counters.items():
        value = parse_hook_counter(text)
        if value is None:
            continue
        if key.startswith(REAPED_KEY):
            reaped.values[labels([("proof", key.removeprefix(REAPED_KEY))])] = value
        elif key.startswith(CLAIMS_KEY):
            claims.values[labels([("result", key.removeprefix(CLAIMS_KEY))])] = value
        elif key == TIMEOUTS_KEY:
            claims.values[labels([("result", LOCK_TIMEOUT)])] = value
    waited = parse_hook_counter(snapshot.counters.get(WAITED_KEY, ""))
    return [
        states,
        Metric(RECONCILED, {} if snapshot.reconciled is None else {"": snapshot.reconciled}),
        reaped,
        claims,
        Metric(WAITED, {} if waited is None else {"": waited}),
    ]


def parse_hook_counter(text: str) -> float | None:
    """Return a counter of the hooks, None for what is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
