# SPDX-License-Identifier: Apache-2.0
"""Health checks of gpulockd that give way to a claim.

Hot, loaded where devices are short and such a check has one.
"""

import time

from gpulock.alloc.availability import pick_free_devices
from gpulock.alloc.choose import ClaimRequest
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.store import grants
from gpulock.store.locks import Lock
from gpulock.store.owner import ENDING_COMMENT

PAUSE = 0.01  # seconds


def ask_checks_to_end(
    node: Node, devices: list[Device], held: dict[str, Lock], want: ClaimRequest
) -> dict[str, str]:
    """Mark the health checks whose devices would be enough for a claim; return tokens, by lock.

    The mark is the comment of a check's own record, and gpulockd ends it. None is marked where the
    claim would get nothing by that. The gate is held. Raises Refusal.
    """
    owners = {name: lock.owner for name, lock in held.items() if lock.owner}
    checks = {name: record for name, record in owners.items() if record.gives_way()}
    if not checks:
        return {}
    others = {name: lock for name, lock in held.items() if name not in checks}
    chosen, _ = pick_free_devices(node, devices, others, want)
    if chosen:
        want.check(chosen)
    asked: dict[str, str] = {}
    for name, record in checks.items():
        if any([lock_ids_overlap(name, device.id) for device in chosen]):
            try:
                grants.rewrite_claim(node.store, record.copy(comment=ENDING_COMMENT))
            except OSError:
                continue  # it runs on, and the claim is refused
            asked[name] = record.token
    return asked


def wait_for_checks(node: Node, asked: dict[str, str], limit: Deadline) -> None:
    """Wait until gpulockd has released these locks; the gate is not held."""
    while limit.left() > 0 and any(
        [node.store.is_held(token, name) for name, token in asked.items()]
    ):
        time.sleep(PAUSE)
