# SPDX-License-Identifier: Apache-2.0
"""Why a claim is refused for want of devices, and who has them, in words.

Hot, loaded where one is. Pure.
"""

from gpulock.alloc.choose import ClaimRequest, LastingReason, usable_devices, whole_claims
from gpulock.alloc.holders import BACK_DO, ENDED_DO, lock_holder
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, UNKNOWN, Refusal, format_requested_gpus
from gpulock.node.devices import Device
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.node.settings import Settings


def impossible_refusal(found: list[Device], want: ClaimRequest, expected: int) -> Refusal:
    """Return the refusal of what the node can never, or not in its present state, grant."""
    if faulty := [d for d in found if d.fault and d.id in want.wanted]:
        # not broken: the other cards work, and gpulockd takes the id out of an RSMAP
        return Refusal(UNKNOWN, f"GPU {faulty[0].label()}: {faulty[0].fault}", "see gpulock status")
    healthy = [d.id for d in found if not d.fault]
    whole = max(expected, len(found))
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
    found: list[Device],
    held: dict[str, Lock],
    out: dict[str, str],
    want: ClaimRequest,
    settings: "Settings",
) -> Refusal:
    """Return the refusal that says who has the devices."""
    if want.share and not want.counted:
        from gpulock.alloc.shares import share_shortage_refusal

        return share_shortage_refusal(found, held, out, want, settings)
    if want.wanted:
        in_the_way = whole_claims(held) if want.share else held
        return wanted_device_refusal(found, in_the_way, out, want)
    count, asked = want.count, format_requested_gpus(want.count)
    if want.kinds:
        from gpulock.alloc.kinds import format_requested_kinds
        from gpulock.node.kinds import is_of_kind

        found = [d for d in found if any([is_of_kind(d, kind) for kind, _ in want.kinds])]
        asked = format_requested_kinds(want)
    holders = [d.fault or lock_holder(held, d.id, out) for d in found]
    names = "; ".join([f"{d.label()}: {who or 'free'}" for d, who in zip(found, holders)])
    lasting = [name for name, why in out.items() if isinstance(why, LastingReason)]
    good = usable_devices(found, lasting)
    return Refusal(
        BUSY,
        f"{asked}, {holders.count('')} of {len(found)} free ({names})",
        BACK_DO if len(good) < count else ENDED_DO,
    )


def wanted_device_refusal(
    found: list[Device], held: dict[str, Lock], out: dict[str, str], want: ClaimRequest
) -> Refusal:
    """Return the refusal of a job that may have certain devices alone."""
    who = [(d, lock_holder(held, d.id, out)) for d in found if d.id in want.wanted]
    gone = [(d, holder) for d, holder in who if holder]
    names = "; ".join([f"{d.label()}: {holder}" for d, holder in gone])
    return Refusal(
        BUSY,
        f"the job needs GPU {','.join([d.label() for d, _ in who])}, not free: {names}",
        f"see gpulock why {gone[0][0].label() if gone else 'JOB'}",
    )
