# SPDX-License-Identifier: Apache-2.0
"""What a power cut may leave of a log of system calls (tests.support.power_log).

It is weaker than ext4, xfs and btrfs are, so what holds here holds there:

- An fsync of a file makes its content durable, and no name. An fsync of a folder makes durable
  which names are in it, but not the folder's own name, and no content.
- Of the rest any part may be kept. Changes of one name are kept in their order; changes of several
  names in any order, also within one folder. A rename is kept whole or not at all, between
  two folders as well. A folder is removed only with all that happened in it before.
- The unsynced content of a file is independent of its names: it is there, is what was durable
  before (of a new file: nothing), is cut short, is zeros in its whole length, or has zeros in the
  place of its first or last blocks, or of one sector.

Assumed are what all of these file systems keep: a write that was synced stays, mkdir and rename
are atomic, and a directory block is never torn.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.support.pairs import zip_equal
from tests.support.power_log import Data, Event, Log, Names, Sync, Told, Tree

SECTOR, PAGE = 512, 4096  # bytes
DRAWN = 2  # times as many as are needed, at most, are made to draw from


class Effort(NamedTuple):
    """How much of what may be left is tried.

    `bits`: up to so many unsynced changes of names every legal subset is tried; of more those that
    differ from all, from none and from each prefix by up to `apart` changes, and `random` others.
    `product`: up to so many combinations of contents each is tried; of more those in which all
    files fare alike, `random` others, and where `each` those in which one fares differently.
    `lines`: a content is also cut in and after each of its lines. Of more than `most` remainders so
    many are drawn, from all moments alike.
    """

    bits: int
    apart: int
    random: int
    product: int
    each: bool
    lines: bool
    most: int


QUICK = Effort(bits=5, apart=1, random=3, product=1, each=False, lines=False, most=80)
WHOLE = Effort(bits=11, apart=2, random=100, product=64, each=True, lines=True, most=20_000)


class Remainder(NamedTuple):
    """What is on the disk after a power cut, and what was acknowledged before it."""

    tree: Tree
    told: frozenset[str]
    events: list[Event]  # before the cut
    kept: frozenset[int]  # the changes of names that are on the disk


def slots(event: Names) -> Iterator[tuple[int, str]]:
    """Yield the names that an event changes."""
    for folder, name, _ in event.changes:
        yield folder, name


def order_of(events: Sequence[Event]) -> tuple[dict[int, set[int]], set[int]]:
    """Return which changes of names each one needs (direct ones), and which are durable."""
    needs: dict[int, set[int]] = {}
    last: dict[tuple[int, str], int] = {}
    within: dict[int, set[int]] = {}
    durable: set[int] = set()
    for number, event in enumerate(events):
        if isinstance(event, Names):
            needs[number] = {last[slot] for slot in slots(event) if slot in last}
            if event.removed is not None:
                needs[number] |= within.get(event.removed, set())
            for slot in slots(event):
                last[slot] = number
                within.setdefault(slot[0], set()).add(number)
        elif isinstance(event, Sync):
            durable |= within.get(event.inode, set())
    return needs, closed(durable, needs)


def closed(kept: Iterable[int], needs: dict[int, set[int]]) -> set[int]:
    """Return some changes and all that they need."""
    todo, found = list(kept), set[int]()
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += needs[one]
    return found


def without(dropped: Iterable[int], needs: dict[int, set[int]]) -> set[int]:
    """Return all changes but some and what needs them."""
    gone = set(dropped)
    for number in sorted(needs):  # what needs a change comes after it
        if needs[number] & gone:
            gone.add(number)
    return needs.keys() - gone


def kept_names(
    events: Sequence[Event], effort: Effort, chance: random.Random
) -> Iterator[frozenset[int]]:
    """Yield which changes of names are kept, each legal set once."""
    needs, durable = order_of(events)
    free = [number for number in needs if number not in durable]
    found: set[frozenset[int]] = set()
    for subset in choices(free, effort, chance):
        kept = without(set(free) - subset, needs)
        if (one := frozenset(kept | durable)) not in found:
            found.add(one)
            yield one
        other = frozenset(closed(subset | durable, needs))
        if other not in found:
            found.add(other)
            yield other


def choices(free: Sequence[int], effort: Effort, chance: random.Random) -> Iterator[set[int]]:
    """Yield subsets, legal or not, of the changes that need not be kept."""
    if len(free) <= effort.bits:
        for size in range(len(free) + 1):
            yield from map(set, itertools.combinations(free, size))
        return
    every = set(free)
    for size in range(len(free) + 1):
        yield set(free[:size])
    for size in range(1, effort.apart + 1):
        for some in itertools.combinations(free, size):
            yield every - set(some)
            yield set(some)
    for _ in range(effort.random):
        yield {number for number in free if chance.random() < 0.5}


def contents(base: bytes, later: Sequence[bytes], effort: Effort) -> list[bytes]:
    """Return what a file may contain whose durable content is `base`: whole, base, zeros, cut."""
    now = later[-1]
    same = len(base)
    while not all(one.startswith(base[:same]) for one in later):
        same -= 1  # what no write touched
    head, tail = now[:same], now[same:]
    found = [now, base, head + bytes(len(tail)), head + tail[: len(tail) // 2], *later]
    for block in (SECTOR, PAGE):
        edge = (same // block + 1) * block - same
        if edge < len(tail):
            found.append(head + tail[:edge] + bytes(len(tail) - edge))
            found.append(head + bytes(edge) + tail[edge:])
    first, last = same // SECTOR + 1, len(now) // SECTOR  # whole sectors that nobody wrote
    some = (
        range(first, last)
        if effort.lines
        else {(first * n + last * (4 - n)) // 4 for n in (1, 2, 3)}
    )
    for sector in some:
        if first <= sector < last:
            begin = sector * SECTOR
            found.append(now[:begin] + bytes(SECTOR) + now[begin + SECTOR :])
    if effort.lines:
        end = 0
        for line in tail.splitlines(keepends=True):
            found += [head + tail[: end + len(line) // 2], head + tail[: end + len(line) - 1]]
            end += len(line)
            found.append(head + tail[:end])
    return list(dict.fromkeys(found))


def unsynced(log: Log, events: Sequence[Event]) -> dict[int, tuple[bytes, list[bytes]]]:
    """Return the durable content of each file that changed since, and its contents since."""
    found: dict[int, tuple[bytes, list[bytes]]] = {}
    for event in events:
        if isinstance(event, Data):
            base = log.content.get(event.inode, b"")
            found.setdefault(event.inode, (base, []))[1].append(event.content)
        elif isinstance(event, Sync) and event.inode in found:
            base, later = found[event.inode]
            found[event.inode] = (later[-1] if later else base), []
    return found


def combinations(
    files: dict[int, list[bytes]], effort: Effort, chance: random.Random
) -> Iterator[dict[int, bytes]]:
    """Yield contents for all files; the first of each list is the whole, the second the base."""
    if math.prod(map(len, files.values())) <= effort.product:
        for chosen in itertools.product(*files.values()):
            yield dict(zip_equal(files, chosen))
        return
    for kind in range(max(map(len, files.values()), default=1)):
        yield {inode: some[min(kind, len(some) - 1)] for inode, some in files.items()}
    for _ in range(effort.random):
        yield {inode: chance.choice(some) for inode, some in files.items()}
    for inode, some in files.items() if effort.each else ():
        for others in (0, 1):
            rest = {other: more[min(others, len(more) - 1)] for other, more in files.items()}
            for content in some:
                yield {**rest, inode: content}


def remainders(log: Log, effort: Effort, start: int = 0) -> Iterator[Remainder]:
    """Yield what may be on the disk after a power cut at any event, each different one once.

    `start`: of the cuts before so many events happened none is tried.
    """
    chance = random.Random(13)
    seen: set[int] = set()
    told = set(log.told)
    for cut in range(len(log.events) + 1):
        events = log.events[:cut]
        if cut and isinstance(event := log.events[cut - 1], Told):
            told.add(event.what)
        if cut < start:
            continue
        changed = unsynced(log, events)
        fixed = log.content | {inode: base for inode, (base, _) in changed.items()}
        files = {i: contents(base, later, effort) for i, (base, later) in changed.items() if later}
        every = list(kept_names(events, effort, chance))
        chance.shuffle(every)
        room = len(seen) + DRAWN * effort.most // len(log.events)
        for kept in every:
            if len(seen) > room:
                break
            names = dict(log.names)
            for number in sorted(kept):
                apply_names(names, events[number])
            paths = log.paths(names)
            linked = {inode for _, inode in paths}
            shown = {inode: some for inode, some in files.items() if inode in linked}
            for chosen in combinations(shown, effort, chance):
                tree = log.tree(paths, {**fixed, **chosen})
                key = hash((frozenset(tree.items()), frozenset(told)))
                if key not in seen:
                    seen.add(key)
                    yield Remainder(tree, frozenset(told), events, kept)


def apply_names(names: dict[tuple[int, str], int], event: Event) -> None:
    """Apply one change of names."""
    assert isinstance(event, Names)
    for folder, name, inode in event.changes:
        if inode is None:
            names.pop((folder, name), None)
        else:
            names[folder, name] = inode


def describe(left: Remainder) -> str:
    """Return what happened before the cut, what of it is lost, and what is left, as a table."""
    lines: list[str] = []
    for number, event in enumerate(left.events):
        if isinstance(event, Names):
            changes = [
                f"{'-+'[to is not None]}{folder}/{name}" for folder, name, to in event.changes
            ]
            lines.append(f"{'     ' if number in left.kept else 'LOST '} {', '.join(changes)}")
        elif isinstance(event, Data):
            lines.append(f"      data of {event.inode}: {len(event.content)} bytes")
        elif isinstance(event, Sync):
            lines.append(f"      fsync {event.inode}")
        else:
            lines.append(f"      told: {event.what}")
    for path, file in sorted(left.tree.items()):
        lines.append(f"left: {path}: {'folder' if file is None else repr(file[1])}")
    return "\n".join(lines)


def check_remainders(
    log: Log, effort: Effort, check: Callable[[Remainder], None], start: int = 0
) -> int:
    """Check each remainder; return how many there were; raise AssertionError with its table."""
    every = list(remainders(log, effort, start))
    if len(every) > effort.most:
        every = random.Random(len(every)).sample(every, effort.most)
    for left in every:
        try:
            check(left)
        except Exception as fault:
            raise AssertionError(f"{fault}\n{describe(left)}") from fault
    return len(every)
