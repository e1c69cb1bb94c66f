# SPDX-License-Identifier: Apache-2.0
"""The table of `gpulock status`: a row a device, and the totals below it. Pure."""

from __future__ import annotations

from gpulock.alloc import states
from gpulock.alloc.states import DeviceState
from gpulock.cli.status.device_use import SampleView, count_seen_foreign
from gpulock.cli.status.status_view import StatusView, group_row_claims
from gpulock.node.devices import SHARE
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import (
    format_count,
    format_duration,
    format_local_time,
    held_seconds,
    short_model,
)

# the higher `drop`, the earlier a column gives way to the others; what is empty is not shown
COLUMNS = (
    Column("GPU", right=True),
    Column("BUS ID", drop=3),
    Column("MODEL", least=10, drop=1),
    Column("STATE"),
    Column("JOB", least=12),
    Column("USER", least=8),
    Column("QUEUE", least=8, drop=2, spare=True),
    Column("NOTE", least=8, drop=2, spare=True),
    Column("SHARE", spare=True),
    Column("HELD FOR", right=True),
    Column("UTIL", right=True, spare=True),
    Column("MEAN", right=True, spare=True, drop=table.EARLY),
    Column("MEM GIB", right=True, spare=True),
    Column("LAST BUSY", right=True, spare=True),
    Column("FOREIGN", right=True, spare=True, drop=table.EARLY + 1),
)
STATE, USE = 3, 10  # columns: what is said of a holder stands between them
GIB = 1 << 30
ENDS_AT = slice(5, 16)  # month, day, hour and minute of a time
MINUTE, HOUR, DAY = 60, 3600, 86400
SMALL = 9.95  # GiB, below which a decimal is shown
UNKNOWN = Cell("-")


def render_status_table(
    view: StatusView, shown: list[DeviceState], width: int, whole: bool
) -> list[str]:
    """Return the lines of the table, with `whole` columns only."""
    rows: list[list[Cell]] = []
    for row in shown:
        first, *others = group_row_claims(row) or [[]]
        rows.append(status_row_cells(view, row, first))
        rows += [other_holder_cells(view, row, locks) for locks in others if locks[0].owner]
    return table.render_table(COLUMNS, rows, width, whole)


def other_holder_cells(view: StatusView, row: DeviceState, locks: list[Lock]) -> list[Cell]:
    """Return the row of one more holder of a device, below the device's own."""
    result = [Cell("")] * len(COLUMNS)
    state = view.holder_state(row, locks[0])
    if state != row.state:
        result[STATE] = table.state_cell(state)
    result[STATE + 1 : USE] = holder_cells(view, locks)
    if row.device is not None and view.use.seen(row.id) is not None:
        result[USE + 1], result[USE + 3] = claim_use_cells(view.use, row, locks[0])
    return result


def holder_cells(view: StatusView, locks: list[Lock]) -> list[Cell]:
    """Return job, user, queue, what its user wrote, which part of a card, and for how long."""
    record = locks[0].owner if locks else None
    if record is None:
        return [Cell("")] * 6
    held = format_duration(held_seconds(record, view.node.boot_id, view.boottime, view.now))
    part = f"{len(locks)}/{record.places or '?'}" if SHARE in locks[0].id else ""
    note = claim_note(view, record)
    return [Cell(text) for text in (record.job(), record.user, record.queue, note, part, held)]


def claim_note(view: StatusView, record: Owner) -> str:
    """Return what a claim's user wrote beside it, and the end that the user chose."""
    if not record.until:
        return record.note
    end = format_local_time(view.now + record.until - view.boottime)
    words = (
        f"until {end[ENDS_AT]}" if record.until > view.boottime else f"over since {end[ENDS_AT]}"
    )
    return f"{record.note}, {words}" if record.note else words


def status_row_cells(view: StatusView, row: DeviceState, locks: list[Lock]) -> list[Cell]:
    """Return the row of a device with the claim that has these locks on it, none where free."""
    device = row.device
    name, bus, model = "-", row.id, Cell("")
    if device is not None:
        name, bus = device.label(), device.bus
        model = table.model_cell(short_model(device.model), device.profile)
    elif row.lock is None:
        bus = ""  # a card that is only known to be missing
    result = [Cell(name), Cell(bus), model, table.state_cell(row.state)]
    use = status_use_cells(view.use, row) if device is not None else [Cell("")] * 5
    return [*result, *holder_cells(view, locks), *use]


def status_use_cells(use: SampleView, row: DeviceState) -> list[Cell]:
    """Return what the exporter tells of a device: `-` where it does not know."""
    seen = use.seen(row.id)
    if seen is None:
        return [UNKNOWN] * 4 + [Cell("")]
    strangers = count_seen_foreign(seen)
    mean, last = claim_use_cells(use, row, row.lock)
    return [
        use_percent_cell(seen.utilization),
        mean,
        memory_use_cell(seen.memory_used, seen.memory_total),
        last,
        Cell(str(strangers), "yellow") if strangers else Cell(""),
    ]


def claim_use_cells(use: SampleView, row: DeviceState, lock: Lock | None) -> tuple[Cell, Cell]:
    """Return how much a device worked for a claim, and when last; that of nobody's where free."""
    name = lock.id if lock else row.id
    mean = use_percent_cell(use.mean(name, lock)) if lock else Cell("")
    return mean, last_busy_cell(use, name, lock)


def use_percent_cell(ratio: float | None) -> Cell:
    """Return `87%`."""
    return UNKNOWN if ratio is None else Cell(f"{min(ratio, 1.0):.0%}")


def memory_use_cell(used: int | None, total: int | None) -> Cell:
    """Return `12/32`, in GiB."""
    if used is None or not total:
        return UNKNOWN
    share = used / GIB
    return Cell(
        f"{share:.1f}/{total / GIB:.0f}" if share < SMALL else f"{share:.0f}/{total / GIB:.0f}"
    )


def last_busy_cell(use: SampleView, device: str, lock: Lock | None) -> Cell:
    """Return `now`, `12m ago`, or `never` of a claim that was observed and did nothing."""
    since = use.last_busy(device, lock)
    if since is not None:
        return Cell("now" if since <= use.oldest else format_busy_age(since))
    return Cell("never", "blue") if use.idle(device, lock) is not None else UNKNOWN


def format_busy_age(seconds: float) -> str:
    """Return `37s ago`, `12m ago`, `4h ago` or `2d ago`."""
    for unit, letter in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        if seconds >= unit:
            return f"{seconds // unit:.0f}{letter} ago"
    return f"{seconds:.0f}s ago"


def format_status_totals(rows: list[DeviceState], width: int) -> list[str]:
    """Return `8 GPUs: 3 free, 4 held, 1 quarantined`; instances make it `devices`."""
    found = states.count_device_states(rows)
    split = any(row.device is not None and row.device.parent for row in rows)
    words = [
        table.paint_text(f"{found[name]} {table.state_cell(name).text}", table.COLOURS[name])
        for name in reversed(states.STATES)
        if found[name] or name == states.FREE
    ]
    return table.wrap_word_list(format_count(len(rows), "device" if split else "GPU"), words, width)
