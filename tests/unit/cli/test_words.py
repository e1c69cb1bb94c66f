# SPDX-License-Identifier: Apache-2.0
"""Times, names and tables as people read them."""

from __future__ import annotations

import fcntl
import pty
import struct
import termios

import pytest

from gpulock.store.owner import Owner
from gpulock.text.table import (
    SLIM,
    Cell,
    Column,
    clip_text,
    model_cell,
    render_table,
    sentence_width,
)
from gpulock.text.words import format_duration, held_seconds, parse_duration, short_model

COLUMNS = (Column("GPU", right=True), Column("MODEL", least=6), Column("JOB", least=4))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-5, "0s"), (0, "0s"), (37.9, "37s"), (60, "1m"), (3599, "59m"), (3600, "1h00m")),
        *((15120, "4h12m"), (86400, "1d00h"), (184500, "2d03h")),
    ],
)
def test_a_duration_is_short_and_read_again(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert format_duration(parse_duration(text)) == text
    assert (parse_duration("90"), parse_duration("1h30m")) == (90.0, 5400.0)


@pytest.mark.parametrize("text", ["", "1x", "h", "1h 30m", "-1", "1.5h", "python", "٣"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)


def test_a_model_loses_what_all_have() -> None:
    names = ("Tesla V100-SXM2-32GB", "NVIDIA GeForce RTX 4090", "NVIDIA RTX 6000 Ada Generation")
    assert [short_model(name) for name in names] == ["V100-SXM2-32GB", "RTX 4090", "RTX 6000 Ada"]


def test_a_claim_of_another_boot_is_timed_by_the_wall_clock() -> None:
    record = Owner(boot_id="now", claimed_boottime=100.0, claimed_at=5000.0)
    assert held_seconds(record, "now", 130.0, 9000.0) == 30.0
    assert held_seconds(record, "other", 130.0, 9000.0) == 4000.0


def plain(*rows: tuple[str, str, str], width: int = 80) -> list[str]:
    from click import unstyle

    cells = [[Cell(part, "red") for part in row] for row in rows]
    return [unstyle(line) for line in render_table(COLUMNS, cells, width)]


def test_a_table_shrinks_where_it_may() -> None:
    lines = plain(("0", "a" * 70, "b" * 70), width=100)
    assert max(len(line) for line in lines) == 100
    assert lines[1].count("…") == 2


def test_on_a_narrow_screen_columns_are_left_out_but_for_the_first_two() -> None:
    rows = ("0", "a" * 30, "b" * 30)
    assert plain(rows, width=70)[1] == f"  0  {'a' * 30}  {'b' * 30}"
    assert plain(rows, width=40)[1] == f"  0  {'a' * 17}…  {'b' * 14}…"
    assert plain(rows, width=5)[1] == "  0  aaaaa…"


@pytest.mark.parametrize(
    ("width", "shown"),
    [(22, "A100-SXM4-80GB 3g.40gb"), (13, "A100… 3g.40gb"), (10, "A… 3g.40gb"), (8, "A100-SX…")],
)
def test_a_mig_profile_is_not_cut_off_where_it_fits(width: int, shown: str) -> None:
    cell = model_cell("A100-SXM4-80GB", "3g.40gb")
    assert clip_text(cell.text, width, cell.tail) == shown


@pytest.mark.parametrize(("columns", "told"), [(60, 60), (120, 120), (10, SLIM)])
def test_a_sentence_is_as_wide_as_its_terminal(columns: int, told: int) -> None:
    master, slave = pty.openpty()
    with open(master, "rb"), open(slave, "w", encoding="utf-8") as stream:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        assert sentence_width(stream) == told
