# SPDX-License-Identifier: Apache-2.0
"""Who has a device, in words for a refusal. Hot, pure."""

from gpulock.node.devices import lock_ids_overlap
from gpulock.store.locks import Lock

ENDED_DO = "the job can run when others have ended"
BACK_DO = "the job can run when enough are back in service, see gpulock status"


def lock_holder(held: dict[str, Lock], device: str, out: dict[str, str]) -> str:
    """Return who has a device, in a word or two; of a shared one everybody; nothing if nobody."""
    holders = [
        lock_owner_words(lock) for name, lock in held.items() if lock_ids_overlap(name, device)
    ]
    away = [why for name, why in out.items() if lock_ids_overlap(name, device)]
    return " and ".join(dict.fromkeys(holders)) or "".join(away[:1])


def lock_owner_words(lock: Lock) -> str:
    """Return who has a lock, in a word or two."""
    if lock.owner is None:
        return "unknown owner"
    job = lock.owner.job()
    if lock.owner.draining:
        return f"job {job}, which has ended, but not its processes"
    return job if lock.owner.scheduler in ("process", "admin") else f"job {job}"
