# SPDX-License-Identifier: Apache-2.0
"""Which waiting callers let others by: those whom nobody else's release would serve.

Such a caller waits for devices of its own user, or for ones that are reserved or out of service.
It lets other users by; the calls of one user keep their order.
Any other caller at the head keeps the devices free, so that small requests do not starve it.
"""

from __future__ import annotations

import copy

from gpulock.alloc.availability import pick_free_devices
from gpulock.alloc.choose import ClaimRequest
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.store.locks import Lock


def must_yield(node: Node, want: ClaimRequest) -> bool:
    """Return whether a request stays refused although all other users gave their devices back.

    `want` is as a claim that was refused as busy left it: with its user, and its kinds resolved.
    """
    alone = copy.copy(node)
    alone.settings = copy.copy(node.settings)
    alone.settings.mps_dir = ""  # an MPS ends with the shares that it is for
    try:
        locks = node.store.read_all_locks().items()
        held = {name: lock for name, lock in locks if stays_held(lock, want.uid)}
        chosen, _ = pick_free_devices(alone, node.devices(), held, want)
    except (Refusal, OSError):
        return False
    return not chosen


def stays_held(lock: Lock, uid: int) -> bool:
    """Return whether a lock is none that another user than `uid` would give back."""
    record = lock.owner
    if record is None:  # nobody knows whose it is
        return True
    return record.uid == uid if record.scheduler != "admin" else not record.gives_way()
