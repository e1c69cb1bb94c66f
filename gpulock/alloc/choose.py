# SPDX-License-Identifier: Apache-2.0
"""What a claim asks for, and which of the free devices it gets: a pure, deterministic function.

Hot. First the best links inside the set (a job's GPUs talk to each other), then the best links
among the devices that stay free (a single takes the card that nobody misses), then the lowest
indexes. All sets of 16 GPUs are tried; of more devices, such as many MIG instances, the first.
"""

from gpulock.node.devices import SHARE, Device, lock_ids_overlap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from gpulock.store.locks import Lock

MOST_PAIRS = (
    1 << 20
)  # pairs in the sets that are tried: 50 ms (docs/facts/locking.md, cost of choosing)
NVLINK, SWITCH, NUMA, OTHER = 100, 30, 10, 1  # one NVLink outweighs any way through the host
FABRIC_LINKS = 18  # an NVSwitch joins any two GPUs at full width
LATE, LAST = 1, 2  # after all others; after these as well: it may not work, or not long
CHECK_SECONDS = 2.0  # gpulockd ends a health check in a tenth of that, but not in a round
SHARED_BRIDGES = 3  # host bridge, root port, switch: from there on the way is a PCIe switch's


class ClaimRequest:
    """What is asked for: `count` devices, of `wanted` ids alone where there are some.

    `join`: a task may share what its job holds here already. `share`: places on cards are enough,
    on each of the `wanted` cards where there are some, beside others' (gpulock.alloc.shares);
    `counted`: the caller has counted them. `check` refuses what was chosen, `check_held` locks
    that the job has here already. `last` are ids that
    are taken only where there are not enough others, and how late: LATE or LAST. `kinds` are
    (kind, count) of gpulock.node.kinds, whose sum is `count`; an empty kind is what PLAIN_REQUEST
    says. `kept` are ids that this user does not get, each with why. `uid` is whose claim it is,
    once it is made. `asked` are the locks of health checks that gpulockd ends for it, and
    `patience` how many seconds it waits for that.
    """

    def __init__(
        self,
        count: int,
        wanted: tuple[str, ...] = (),
        join: bool = False,
        check: "Callable[[list[Device]], object]" = list,
        share: bool = False,
        kinds: "tuple[tuple[str, int], ...]" = (),
    ) -> None:
        self.check = check
        self.check_held: "Callable[[list[Lock]], object]" = list
        self.last: dict[str, int] = {}
        self.count = count
        self.wanted = wanted
        self.join = join
        self.share = share
        self.counted = False
        self.uid = -1
        self.asked: dict[str, str] = {}
        self.patience = CHECK_SECONDS
        self.kinds = kinds
        self.kept: dict[str, str] = {}


class LastingReason(str):
    """Why a device is out until an administrator or gpulockd brings it back, in words."""


QUARANTINED, WITHHELD = LastingReason("quarantined"), LastingReason("no MIG instance")


def usable_devices(devices: list[Device], taken: "Collection[str]") -> list[Device]:
    """Return the devices that work, and of which nothing is taken (ids of locks)."""
    return [
        d for d in devices if not d.fault and not any([lock_ids_overlap(d.id, t) for t in taken])
    ]


def whole_claims(held: "dict[str, Lock]") -> "dict[str, Lock]":
    """Return the locks that nobody can hold a share beside."""
    return {name: lock for name, lock in held.items() if SHARE not in name}


def pair_score(a: Device, b: Device, links: dict[tuple[str, str], int]) -> int:
    """Return how well two devices are joined; higher is better."""
    if a.bus == b.bus:
        return NVLINK * FABRIC_LINKS  # instances of one card
    if a.switched and b.switched:
        return NVLINK * FABRIC_LINKS
    joined = links.get((a.bus, b.bus), 0)
    if joined:
        return NVLINK * joined
    if len(a.path) >= SHARED_BRIDGES and a.path[:SHARED_BRIDGES] == b.path[:SHARED_BRIDGES]:
        return SWITCH
    return NUMA if a.numa == b.numa and a.numa >= 0 else OTHER


def choose_devices(
    free: list[Device],
    count: int,
    links: "dict[tuple[str, str], int] | None" = None,
    last: "dict[str, int] | None" = None,
) -> list[Device]:
    """Return `count` of `free` (in their order), or nothing when there are too few.

    Of those that come `last` as few as can be. Several are whole cards where there are enough: CUDA
    shows a process one MIG instance only, and a busy card is better than an instance too many.
    """
    if count <= 0 or count > len(free):
        return []
    whole = [device for device in free if not device.parent]
    if 1 < count <= len(whole):
        free = whole
    chosen: list[Device] = []
    for late in (0, LATE, LAST):
        equal = [device for device in free if (last or {}).get(device.id, 0) == late]
        more = count - len(chosen)
        if 0 < more < len(equal):
            best = choose_best_set(score_pairs(equal, links or {}), more)
            equal = [equal[place] for place in best]
        chosen += equal[:more]
    return [device for device in free if device in chosen]


def score_pairs(free: list[Device], links: dict[tuple[str, str], int]) -> list[list[int]]:
    """Return the score of every pair, 0 on the diagonal."""
    size = len(free)
    scores = [[0] * size for _ in free]
    for i, one in enumerate(free):
        row = scores[i]
        for j in range(i):
            row[j] = scores[j][i] = pair_score(one, free[j], links)
    return scores


def choose_best_set(scores: list[list[int]], count: int) -> list[int]:
    """Return the best set of `count` indexes, of equal ones the lowest."""

    def value(members: tuple[int, ...]) -> tuple[int, int]:
        inner = sum([scores[a][b] for at, a in enumerate(members) for b in members[:at]])
        return inner, -sum([weight[i] for i in members])  # links inside, links taken from the rest

    weight = [sum(row) for row in scores]
    best: tuple[int, ...] = max(list_sets(len(scores), count), key=value)
    return list(best)


def list_sets(size: int, count: int) -> "Iterable[tuple[int, ...]]":
    """Return the sets of `count` indexes that are tried, the lowest first."""
    if count == 1:
        return [(one,) for one in range(size)]
    from itertools import combinations, islice  # 0.1 ms, which most claims need not pay

    return islice(combinations(range(size), count), MOST_PAIRS // max(count, 8) ** 2)
