# SPDX-License-Identifier: Apache-2.0
"""The last minutes of each device's utilisation, for the page; and the page's tiles. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpulock.alloc import states
from gpulock.daemon.health.findings import HARDWARE, describe_recovery_action
from gpulock.store.owner import Owner
from gpulock.store.reservations import Reservation
from gpulock.store.waiting import WaitingCaller
from gpulock.text.words import format_duration, held_seconds
from gpulock_exporter.clock import Moment
from gpulock_exporter.metrics.labels import LabelUser
from gpulock_exporter.state.snapshot import DeviceSnapshot, NodeSnapshot
from gpulock_exporter.web.page import Page, Tile

LENGTH = 300  # values, one a second
SHOWN = 100  # points of a sparkline
MOST_CALLERS = 20  # of the queue
HOT = 88.0  # degrees: above what cards run at in good air, as the alert GpulockGpuHot has it


class UtilizationHistory:
    """One value a second and device; None where it was not observed."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float | None]] = {}

    def add(self, values: Mapping[str, float | None]) -> None:
        """Take one second; a device that is gone is forgotten."""
        for name in set(self._values) - set(values):
            del self._values[name]
        for name, value in values.items():
            self._values.setdefault(name, deque(maxlen=LENGTH)).append(value)

    def of(self, name: str) -> list[float | None]:
        """Return a device's line, thinned to means of what was observed."""
        seen = self._values.get(name, ())
        values: list[float | None] = [None] * (LENGTH - len(seen))  # not seen, so not drawn
        values += seen
        step = max(1, LENGTH // SHOWN)
        groups = [values[at : at + step] for at in range(0, len(values), step)]
        return [mean_of_known(group) for group in groups]


def mean_of_known(values: list[float | None]) -> float | None:
    """Return the mean of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def build_page(
    snapshot: NodeSnapshot,
    history: UtilizationHistory,
    node: str,
    label_user: LabelUser,
    boot_id: str = "",
) -> Page:
    """Return the landing page of a moment, in the boot `boot_id` where that is known."""
    sampled = snapshot.health.sampled
    warnings = {seen.id: tuple(device_warnings(seen, snapshot.at)) for seen in snapshot.devices}
    _, unread = snapshot.health.collectors.get("locks", (None, ""))
    return Page(
        node=node,
        version=snapshot.health.version,
        tiles=[
            replace(
                build_tile(seen, history, snapshot.at, label_user, boot_id),
                warnings=warnings.get(seen.parent, ()) + warnings[seen.id],
            )
            for seen in sorted(snapshot.devices, key=device_sort_key)
            if seen.state is not None or (unread and not in_mig_mode(seen))
        ],
        old=max(0.0, snapshot.at.wall - sampled) if sampled is not None else None,
        unread=unread,
        driver=snapshot.driver,
        waiting=[
            describe_caller(one, snapshot.at, label_user) for one in snapshot.waiting[:MOST_CALLERS]
        ],
        reserves=[
            describe_reservation(one, snapshot, label_user)
            for one in snapshot.reservations[:MOST_CALLERS]
        ],
    )


def describe_caller(caller: WaitingCaller, now: Moment, label_user: LabelUser) -> str:
    """Return who waits, since when, for what and why; a person is named as in the metrics."""
    who = label_user.of(Owner(user=caller.user, uid=caller.uid)) or f"number {caller.number}"
    waited = format_duration(now.boottime - caller.since)
    return f"{who} waits {waited} for {caller.what}: {caller.why}"


def describe_reservation(one: Reservation, snapshot: NodeSnapshot, label_user: LabelUser) -> str:
    """Return for whom a GPU is reserved, from when to when; a person is named as in the metrics."""
    who = label_user.of(Owner(user=one.user, uid=one.uid)) or "a user"
    names = {seen.id: seen.gpu_label or seen.id for seen in snapshot.devices}
    return f"GPU {names.get(one.device, one.device)}: {one.describe(who)}"


def in_mig_mode(seen: DeviceSnapshot) -> bool:
    """Return whether a device is a card in MIG mode: only its instances are granted."""
    return bool(seen.mig and not seen.instance)


def device_sort_key(seen: DeviceSnapshot) -> tuple[bool, int, list[int]]:
    """Return what devices are shown in order of: gi10 comes after gi2."""
    numbers = [int(part) for part in re.findall(r"\d+", seen.instance)]
    return seen.card is None, seen.card or 0, numbers


def build_tile(
    seen: DeviceSnapshot,
    history: UtilizationHistory,
    now: Moment,
    label_user: LabelUser,
    boot_id: str,
) -> Tile:
    """Return one device's tile; a person is named as in the metrics, or not at all."""
    record = seen.owner
    job = user = held = ""
    if record is not None:
        job = page_job_name(record)
        user = label_user.of(record)
        held = format_duration(held_seconds(record, boot_id, now.boottime, now.wall))
    if seen.sharers:
        job = f"shared by {', '.join(list_page_sharers(seen))}"
        users = dict.fromkeys(label_user.of(one) for one in seen.sharers.values())
        user = ", ".join(name for name in users if name)
    return Tile(
        name=seen.instance or seen.gpu_label or seen.id,
        model=seen.profile or seen.name,
        state=seen.state or "unknown",
        place=seen.id,
        job=job,
        user=user,
        held=held,
        note=device_note(seen, now),
        mean=None if seen.sharers else seen.mean,
        card=f"GPU {seen.card} {seen.name}" if seen.instance else "",
        utilization=seen.utilization,
        history=history.of(seen.id),
        memory_used=seen.memory_used,
        memory_total=seen.memory_total,
        temperature=seen.temperature,
        power=seen.power,
    )


def page_job_name(record: Owner) -> str:
    """Return how the page names who holds a device."""
    return record.job() if record.scheduler in ("process", "admin") else f"job {record.job()}"


def list_page_sharers(seen: DeviceSnapshot) -> Iterable[str]:
    """Return the claims that share a device, each once, and how much it worked at the last look."""
    found: dict[str, str] = {}
    for name, record in seen.sharers.items():
        use = seen.share_use.get(name)
        worked = "" if use is None else f" ({use:.0%})"
        found.setdefault(record.token, f"{page_job_name(record)}{worked}")
    return found.values()


def device_note(seen: DeviceSnapshot, now: Moment) -> str:
    """Return what a person should know of a device's state: why, since when, how many."""
    if seen.state == states.HELD_IDLE and seen.idle_since is not None:
        idle = format_duration(now.wall - seen.idle_since)
        return f"observed to do nothing for {idle}"
    if seen.state in (states.FOREIGN, states.HELD, states.HELD_IDLE) and seen.foreign:
        number = f"{seen.foreign} foreign process{'es' if seen.foreign > 1 else ''}"
        return f"{number} beside the owner's" if seen.owner else number
    if seen.owner and seen.owner.scheduler == "admin" and not seen.reason:
        return seen.owner.comment
    return seen.reason


def device_warnings(seen: DeviceSnapshot, now: Moment) -> Iterator[str]:
    """Yield what speaks against a device, whatever its state: what it had in this boot, or has.

    The driver's word and a failed check of gpulockd's may be the same.
    """
    for xid, (_, at) in sorted(seen.xids.items()):
        if xid in HARDWARE:
            yield f"XID {xid} ({HARDWARE[xid]}), {format_duration(now.wall - at)} ago"
    found = [why for _, why in sorted(seen.checks.items())]
    if seen.recovery_action:
        found.append(f"the driver asks for {describe_recovery_action(seen.recovery_action)}")
    if seen.remap_failure:
        found.append("a row of its memory could not be remapped")
    yield from dict.fromkeys(filter(None, found))
    if seen.temperature is not None and seen.temperature > HOT:
        yield f"{seen.temperature:.0f} °C is hot"
