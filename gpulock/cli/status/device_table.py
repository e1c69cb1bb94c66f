# SPDX-License-Identifier: Apache-2.0
"""The table of `gpulock status`: a row a device, and the totals below it. Pure."""

from __future__ import annotations

from gpulock.alloc.states import DeviceState
from gpulock.cli.status.device_use import SampleView, count_seen_foreign
from gpulock.cli.status.status_view import StatusView, group_by_claim
from gpulock.errors import quote_text
from gpulock.node.devices import SHARE
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import GIB, format_duration, format_local_time, held_seconds, short_model

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
    Column("TEMP", right=True, spare=True, drop=table.EARLY + 3),
    Column("POWER", right=True, spare=True, drop=table.EARLY + 2),
    Column("LAST BUSY", right=True, spare=True),
    Column("FOREIGN", right=True, spare=True, drop=table.EARLY + 1),
)
OBSERVED = ("UTIL", "MEM GIB", "TEMP", "POWER", "LAST BUSY")
ENDS_AT = slice(5, 16)  # month, day, hour and minute of a time
HIGHEST_READING = 9999  # degrees or watts that a sample is believed
COMMENT_CHARACTERS = 40  # characters of what a user wrote
SMALL = 9.95  # GiB, below which a decimal is shown
UNKNOWN = Cell("-")
Cells = dict[str, Cell]  # by title of their columns


def render_status_table(view: StatusView, shown: list[DeviceState], width: int) -> list[str]:
    """Return the lines of the table: of a device that several hold, a line each."""
    rows: list[Cells] = []
    for row in shown:
        first, *others = group_by_claim(row.locks()) or [[]]
        rows.append(
            device_cells(row)
            | ({"NOTE": Cell("reserved")} if row.reserved else holder_cells(view, first))
            | (use_cells(view.use, row) if row.device else {})
        )
        rows += [other_holder_cells(view, row, locks) for locks in others if locks[0].owner]
    blank = Cell("")
    cells = [[row.get(column.title, blank) for column in COLUMNS] for row in rows]
    return table.render_table(COLUMNS, cells, width)


def device_cells(row: DeviceState) -> Cells:
    """Return what a device is, and its state."""
    cells = {"GPU": Cell("-"), "STATE": table.state_cell(row.state)}
    if device := row.device:
        model = table.model_cell(short_model(device.model), device.profile)
        cells |= {"GPU": Cell(device.label()), "BUS ID": Cell(device.bus), "MODEL": model}
    elif row.lock is not None or row.noted:  # else nobody knows which card is missing
        cells["BUS ID"] = Cell(row.id)
    return cells


def other_holder_cells(view: StatusView, row: DeviceState, locks: list[Lock]) -> Cells:
    """Return the row of one more holder of a device, below the device's own."""
    cells = holder_cells(view, locks)
    state = view.row_of_lock(row, locks[0]).state
    if state != row.state:
        cells["STATE"] = table.state_cell(state)
    if row.device is not None and view.use.seen(row.id) is not None:
        cells |= claim_use_cells(view.use, row, locks[0])
    return cells


def holder_cells(view: StatusView, locks: list[Lock]) -> Cells:
    """Return job, user, queue, what its user wrote, which part of a card, and for how long."""
    record = locks[0].owner if locks else None
    if record is None:
        return {}
    held = format_duration(held_seconds(record, view.node.boot_id, view.boottime, view.now))
    part = f"{len(locks)}/{record.places or '?'}" if SHARE in locks[0].id else ""
    return {
        "JOB": Cell(record.job()),
        "USER": Cell(record.user),
        "QUEUE": Cell(record.queue),
        "NOTE": Cell(claim_note(view, record)),
        "SHARE": Cell(part),
        "HELD FOR": Cell(held),
    }


def claim_note(view: StatusView, record: Owner) -> str:
    """Return what a claim's user wrote beside it, and the end that the user chose."""
    note = quote_text(table.clip_text(record.note, COMMENT_CHARACTERS)) if record.note else ""
    if not record.until:
        return note
    end = format_local_time(view.now + record.until - view.boottime)[ENDS_AT]
    words = f"until {end}" if record.until > view.boottime else f"over since {end}"
    return f"{words}, {note}" if note else words


def use_cells(use: SampleView, row: DeviceState) -> Cells:
    """Return what the exporter tells of a device: `-` where it does not know."""
    seen = use.seen(row.id)
    if seen is None:
        return dict.fromkeys(OBSERVED, UNKNOWN)
    strangers = count_seen_foreign(seen)
    return {
        "UTIL": table.percent_cell(seen.utilization),
        "MEM GIB": memory_use_cell(seen.memory_used, seen.memory_total),
        "TEMP": number_cell(seen.temperature, "C"),
        "POWER": number_cell(seen.power, "W"),
        "FOREIGN": Cell(str(strangers), "yellow") if strangers else Cell(""),
        **claim_use_cells(use, row, row.lock),
    }


def claim_use_cells(use: SampleView, row: DeviceState, lock: Lock | None) -> Cells:
    """Return how much a device worked for a claim, and when last; that of nobody's where free."""
    name = lock.id if lock else row.id
    mean = table.percent_cell(use.mean(name, lock)) if lock else Cell("")
    return {"MEAN": mean, "LAST BUSY": last_busy_cell(use, name, lock)}


def number_cell(value: float | None, unit: str) -> Cell:
    """Return `61C` or `287W`."""
    return UNKNOWN if value is None else Cell(f"{min(value, HIGHEST_READING):.0f}{unit}")


def memory_use_cell(used: int | None, total: int | None) -> Cell:
    """Return `12/32`, in GiB."""
    if used is None or not total:
        return UNKNOWN
    share = used / GIB
    return Cell(f"{share:.{int(share < SMALL)}f}/{total / GIB:.0f}")


def last_busy_cell(use: SampleView, device: str, lock: Lock | None) -> Cell:
    """Return `now`, `12m ago`, or `never` of a claim that was observed and did nothing."""
    since = use.last_busy(device, lock)
    if since is not None:
        return Cell("now" if since <= use.oldest else f"{format_duration(since)} ago")
    return Cell("never", "blue") if use.idle(device, lock) is not None else UNKNOWN
