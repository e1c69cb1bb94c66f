# SPDX-License-Identifier: Apache-2.0
"""Why a claim is refused for want of devices, and who has them, in words.

Hot, loaded where one is. Pure.
"""

from gpulock.alloc.choose import ClaimRequest, LastingReason, usable_devices, whole_claims
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, UNKNOWN, Refusal, format_requested_gpus
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.node.settings import Settings

ENDED_DO = "the job can run when others have ended"
OVER_DO = "the job can run when the reservations are over, see gpulock status"
BACK_DO = "the job can run when enough are back in service, see gpulock status"


def impossible_refusal(devices: list[Device], want: ClaimRequest, expected: int) -> Refusal:
    """Return the refusal of what the node can never, or not in its present state, grant."""
    if faulty := [d for d in devices if d.fault and d.id in want.wanted]:
        # not broken: the other cards work, and gpulockd takes the id out of an RSMAP
        return Refusal(UNKNOWN, f"GPU {faulty[0].label()}: {faulty[0].fault}", "see gpulock status")
    healthy = [d.id for d in devices if not d.fault]
    whole = max(expected, len(devices))
    asked = format_requested_gpus(want.count)
    if want.count > whole:
        return Refusal(INVALID_REQUEST, f"{asked}, this node has {whole}", "ask for fewer")
    if want.count > len(healthy):
        return Refusal(
            BROKEN,
            f"{asked}, {len(healthy)} of {whole} work",
            "see gpulock status for the missing card",
        )
    missing = next(name for name in want.wanted if name not in healthy)
    return Refusal(INVALID_REQUEST, f"no device {missing} here", "see gpulock status")


def shortage_refusal(
    devices: list[Device],
    held: dict[str, Lock],
    out: dict[str, str],
    want: ClaimRequest,
    settings: "Settings",
) -> Refusal:
    """Return the refusal that says who has the devices.

    `out` has why a device gives none, a LastingReason where no other job's end helps.
    """
    if want.share and not want.counted:
        return share_shortage_refusal(devices, held, out, want, settings)
    if want.wanted:
        return wanted_device_refusal(devices, held, out, want)
    count, asked = want.count, format_requested_gpus(want.count)
    if want.kinds:
        from gpulock.alloc.kinds import format_requested_kinds
        from gpulock.node.kinds import is_of_kind

        devices = [d for d in devices if any([is_of_kind(d, kind) for kind, _ in want.kinds])]
        asked = format_requested_kinds(want)
    holders = [d.fault or lock_holder(held, d.id, out) for d in devices]
    names = "; ".join([f"{d.label()}: {who or 'free'}" for d, who in zip(devices, holders)])
    lasting = [name for name, why in out.items() if isinstance(why, LastingReason)]
    good = usable_devices(devices, lasting)
    do = OVER_DO if len(usable_devices(good, [*want.kept])) < count else ENDED_DO
    kept = [who for d, who in zip(devices, holders) if who and who == want.kept.get(d.id)]
    reserved = f", {len(kept)} reserved" if kept else ""
    return Refusal(
        BUSY,
        f"{asked}, {holders.count('')} of {len(devices)} free{reserved} ({names})",
        BACK_DO if len(good) < count else do,
    )


def wanted_device_refusal(
    devices: list[Device], held: dict[str, Lock], out: dict[str, str], want: ClaimRequest
) -> Refusal:
    """Return the refusal of a job that may have only certain devices."""
    wanted = [d for d in devices if d.id in want.wanted]
    gone: list[tuple[Device, str]] = []
    # For a share whole claims are in the way first, then other shares.
    for locks in [whole_claims(held), held] if want.share else [held]:
        gone = gone or [(d, who) for d in wanted if (who := lock_holder(locks, d.id, out))]
    names = "; ".join([f"{d.label()}: {who}" for d, who in gone])
    return Refusal(
        BUSY,
        f"the job needs GPU {','.join([d.label() for d in wanted])}, not free: {names}",
        f"see gpulock why {(gone[0][0] if gone else wanted[0]).label()}",
    )


def share_shortage_refusal(
    devices: list[Device],
    held: dict[str, Lock],
    out: dict[str, str],
    want: "ClaimRequest",
    settings: "Settings",
) -> Refusal:
    """Return the refusal that says who has the shares; `out` has why a device gives none."""
    from gpulock.alloc.shares import (
        count_free_places,
        format_requested_shares,
        largest_share_claim,
        list_card_places,
    )

    there = list_card_places(devices, held, settings.shares)
    cards = [device for device in devices if device.id in (want.wanted or there)]
    usable = [there[card.id] for card in usable_devices(cards, [*whole_claims(held), *out])]
    free = sum([count_free_places(card) for card in usable])
    uid = want.uid if settings.share_users == "one" else None
    mine = sum([count_free_places(card, uid) for card in usable])
    alone = ", a card is one user's at a time" if mine < free else ""
    who = [(card.index, lock_holder(held, card.id, out) or "free") for card in cards]
    names = "; ".join([f"{index}: {holder}" for index, holder in who])
    lasting = [name for name, why in out.items() if isinstance(why, LastingReason)]
    good = {card.id: there[card.id].places for card in usable_devices(cards, lasting)}
    most = len(good) if want.wanted else largest_share_claim(good, settings)
    total = sum([there[card.id].places for card in cards])
    return Refusal(
        BUSY,
        f"{format_requested_shares(want.count)}, {free} of {total} free{alone} ({names})",
        BACK_DO if most < want.count else ENDED_DO,
    )


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
    if lock.owner.scheduler == "process":
        return f"{job} of {lock.owner.user}"
    return job if lock.owner.scheduler == "admin" else f"job {job}"
