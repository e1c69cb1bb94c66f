# SPDX-License-Identifier: Apache-2.0
"""Who has a device, in words for a refusal. Hot, pure."""

from gpulock.node.devices import SHARE, Device, lock_ids_overlap
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

ENDED_DO = "the job can run when others have ended"
BACK_DO = "the job can run when enough are back in service, see gpulock status"


class LastingReason(str):
    """Why a device is out until an administrator or gpulockd brings it back, in words."""


QUARANTINED, WITHHELD = LastingReason("quarantined"), LastingReason("no MIG instance")


def usable_devices(found: list[Device], taken: "Collection[str]") -> list[Device]:
    """Return the devices that work, and of which nothing is taken (ids of locks)."""
    return [d for d in found if not d.fault and not any([lock_ids_overlap(d.id, t) for t in taken])]


def whole_claims(held: dict[str, Lock]) -> dict[str, Lock]:
    """Return the locks that nobody can hold a share beside."""
    return {name: lock for name, lock in held.items() if SHARE not in name}


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
