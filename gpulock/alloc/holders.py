# SPDX-License-Identifier: Apache-2.0
"""Who has a device, in words for a refusal. Hot, pure."""

from gpulock.node.devices import SHARE, lock_ids_overlap
from gpulock.store.locks import Lock

OUT = "quarantined"  # of a device that an administrator or gpulockd brings back


def whole_claims(held: dict[str, Lock]) -> dict[str, Lock]:
    """Return the locks that nobody can hold a share beside."""
    return {name: lock for name, lock in held.items() if SHARE not in name}


def lock_holder(held: dict[str, Lock], device: str, out: dict[str, str]) -> str:
    """Return who has a device, in a word or two; of a shared one everybody."""
    holders = [
        lock_owner_words(lock) for name, lock in held.items() if lock_ids_overlap(name, device)
    ]
    away = [why for name, why in out.items() if lock_ids_overlap(name, device)]
    return " and ".join(dict.fromkeys(holders)) or (away[0] if away else "free")


def lock_owner_words(lock: Lock) -> str:
    """Return who has a lock, in a word or two."""
    if lock.owner is None:
        return "unknown owner"
    job = lock.owner.job()
    if lock.owner.draining:
        return f"job {job}, which has ended, but not its processes"
    return job if lock.owner.scheduler in ("process", "admin") else f"job {job}"
