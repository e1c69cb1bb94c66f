# SPDX-License-Identifier: Apache-2.0
"""A report: what it says of a job, and that it fits into 80 columns whatever the job did."""

from __future__ import annotations

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.report.claims import ReportedClaim, parse_reported_claim
from gpulock.report.text import (
    BAR,
    advise_job_owner,
    draw_bar,
    draw_sparkline,
    format_energy,
    format_job_report,
    format_memory_peak,
)
from gpulock.text.words import format_percent
from tests.support.trees import bus

GIB = 1 << 30
HOUR, DAY = 3600.0, 86400.0
MONTH = 30 * DAY
BEGUN = 1_700_000_000.0
H100 = "NVIDIA H100 80GB HBM3"


def card(number: int = 0, held: float = HOUR, use: float = 0.5, **fields: Any) -> dict[str, Any]:
    """Return a device of a record that was observed all the time."""
    return {
        "id": bus(number),
        "index": number,
        "minor": number,
        "model": H100,
        "held_seconds": held,
        "observed_seconds": held,
        "busy_seconds": held * use,
        "memory_bytes": 80 * GIB,
        "memory_peak_bytes": 40 * GIB,
        "energy_joules": 400.0 * held,
        **fields,
    }


def record(*cards: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a record of the history."""
    held = max([one["held_seconds"] for one in cards], default=0.0)
    return {
        "version": 1,
        "token": "feed",
        "claimed_at": BEGUN,
        "held_seconds": held,
        "released_at": BEGUN + held,
        "scheduler": "slurm",
        "cluster": "main",
        "node": "node1",
        "job_id": "12",
        "task_id": "",
        "user": "alice",
        "uid": 1000,
        "queue": "gpu",
        "gpus": len(cards),
        "how": "epilog",
        "devices": list(cards),
        "shapes": {},
        **fields,
    }


def claim(*cards: dict[str, Any], **fields: Any) -> ReportedClaim:
    """Return a claim."""
    return parse_reported_claim(record(*cards, **fields))


def text_of(*claims: ReportedClaim) -> list[str]:
    """Return a report without colour, in ASCII."""
    return [click.unstyle(line) for line in format_job_report(claims)]


def test_a_report_says_what_each_device_did() -> None:
    shape = {bus(0): {"width": 64.0, "use": [0, 250, 1000, None] * 14}}
    found = text_of(claim(card(0, use=0.61), card(1, use=0.0), shapes=shape, held_seconds=HOUR))
    assert found[0] == "Job 12 of alice on node1 (gpu): 2 GPUs, H100 80GB HBM3"
    assert found[3:6] == [
        "GPU  BUSY                         IDLE  UNSEEN   MEMORY PEAK     ENERGY",
        "  0  ############........  61 %   39 %     0 %  40 of 80 GiB  0.400 kWh",
        "  1  ....................   0 %  100 %     0 %  40 of 80 GiB  0.400 kWh",
    ]
    assert found[7:9] == [
        "Over time, 1m a column; blank: not observed",
        "  0  " + "_-# " * 13 + "_-#",
    ]
    assert "In all: 2.00 GPU hours held, 0.61 busy, 1.39 idle, 0.00 not observed" in found
    assert found[-1] == "Never used: GPU 1. Ask for 1."


def test_a_card_that_was_observed_for_a_shorter_time_has_no_line_over_time() -> None:
    """So it is of one that fell off the bus: its columns are of other times."""
    shapes = {
        bus(1): {"width": 1.0, "use": [0, 1000]},
        bus(2): {"width": 64.0, "use": [1000, 0]},
    }
    found = text_of(claim(card(0), card(1), card(2), shapes=shapes))
    begin = found.index("Over time, 1m a column; blank: not observed")
    assert found[begin + 1 : begin + 3] == ["  2  #_", ""]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "0"),
        ({"id": f"{bus(0)}.gi3"}, "0:gi3"),
        ({"index": None}, bus(0)),
        ({"share": True, "places": 4}, "0 (1/4)"),
        ({"share": True, "places": None}, "0 (1/?)"),  # of how many nobody knows
    ],
)
def test_a_device_has_the_name_that_status_gives_it(fields: dict[str, Any], name: str) -> None:
    assert claim(card(0, **fields)).cards[0].name == name


def test_a_line_over_time_of_a_card_without_an_index_is_cut_at_80_columns() -> None:
    shape = {bus(0): {"width": 64.0, "use": [1000] * 64}}
    found = text_of(claim(card(0, index=None, share=True, places=4), shapes=shape))
    assert max(len(line) for line in found if "###" in line) == 80


def test_what_was_not_observed_is_neither_busy_nor_idle() -> None:
    found = text_of(claim(card(0, observed_seconds=0, busy_seconds=None, memory_peak_bytes=None)))
    assert found[4].split() == ["0", "not", "observed", "-", "100", "%", "-", "0.400", "kWh"]
    half = text_of(claim(card(0, observed_seconds=HOUR / 2, busy_seconds=HOUR / 4)))
    assert half[4].split()[1:8] == ["#####...............", "25", "%", "25", "%", "50", "%"]


def test_the_end_is_told_where_it_was_no_epilog() -> None:
    found = text_of(claim(card(0), how="reap", proof="its shepherd is gone"))
    assert found[2] == "ended by reap: its shepherd is gone"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (8.0, "In all: 16 GPU seconds held, 16 busy, 0 idle, 0 not observed"),
        (0.0, "In all: GPU hours are not known"),
    ],
)
def test_the_sum_of_a_short_claim_is_in_seconds_and_none_is_made_up(held: float, said: str) -> None:
    assert said in text_of(claim(card(0, held, 1.0), card(1, held, 1.0)))


def test_many_tasks_are_a_line_each_and_a_sum() -> None:
    tasks = [claim(card(0, use=n / 20), task_id=str(n), token=f"t{n}") for n in range(1, 21)]
    found = text_of(*tasks)
    assert len(found) == 1 + 20 + 2
    assert found[1].split()[2] == "12.1" and found[2].split()[2] == "12.2"
    assert found[22] == "In all: 20.00 GPU hours held, 10.50 busy, 9.50 idle, 0.00 not observed"
    places = [card(0, held=0.0, share=True, places=4)] * 2  # of one card
    stands = claim(*places, gpus=1, task_id="21", released_at=None, how=None, held_seconds=None)
    assert text_of(*tasks, stands)[21].split() == [
        "-",
        "12.21",
        "alice",
        *("0", "(1/4)"),
        "-",
        "-",
        "-",
        "-",
        "runs",
    ]


def test_several_runs_are_told_one_after_another_and_the_advice_is_of_the_last() -> None:
    first = claim(card(0, use=0.0), token="a")
    again = claim(
        card(0), token="b", restart=1, claimed_at=BEGUN + DAY, released_at=BEGUN + 2 * DAY
    )
    found = text_of(first, again)
    assert [line.partition(": ")[0] for line in found if line.startswith("Job")] == [
        "Job 12 of alice on node1 (gpu)",
        "Job 12 of alice on node1 (gpu), run 2",
    ]
    assert "ever used" not in "\n".join(found)
    assert "ever used" in text_of(first._replace(begun=BEGUN + 3 * DAY), again)[-1]
    tasks = [claim(card(0, use=0), task_id=number, token=number) for number in "12"]
    assert "never" not in text_of(*tasks)[-1]


@given(
    use=st.floats(0, 1),
    held=st.floats(0, 1e8),
    seen=st.floats(0, 1),
    count=st.integers(1, 16),
    text=st.text(max_size=300),
)
@pytest.mark.slow
def test_no_line_is_wider_than_80_columns(
    use: float, held: float, seen: float, count: int, text: str
) -> None:
    shape = {"width": max(1.0, held / 60), "use": [round(use * 1000)] * 60}
    cards = [
        card(n, held, observed_seconds=held * seen, busy_seconds=held * seen * use)
        for n in range(count)
    ]
    shapes = {bus(n): shape for n in range(count)}
    for how in ("epilog", "reap"):
        one = claim(*cards, shapes=shapes, proof=text, how=how)
        found = text_of(one)
        assert all(len(line) <= 80 for line in found)
        assert "\n".join(found).isascii()


# --- advice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        (
            [card(0), *(card(n, use=0) for n in (1, 2, 3))],
            "Never used: GPU 1, 2, 3. Ask for 1.",
        ),
        (
            [card(0, use=0.0005)],
            "No GPU was ever used: ask for none, or look why the program finds none.",
        ),
        (
            [card(0, MONTH, use=0.9), card(1, MONTH, use=9 / MONTH)],
            "Never used: GPU 1. Ask for 1.",
        ),
        ([card(0, MONTH, use=0.9), card(1, MONTH, use=0.0009)], ""),
        (
            [card(0, use=0), card(1, use=0)],
            "No GPU was ever used: ask for none, or look why the program finds none.",
        ),
        ([card(0, use=0.05)], "At work 5 % of the time: look what the program waits for."),
        ([card(0, use=0.002)], "At work <1 % of the time: look what the program waits for."),
        ([card(0, 599, use=0)], ""),
        ([card(0, use=0, observed_seconds=HOUR * 0.89)], ""),
        ([card(0), card(1, use=0, busy_seconds=None, observed_seconds=0)], ""),
        ([], ""),
    ],
)
def test_advice_is_given_where_it_is_clear(cards: list[dict[str, Any]], said: str) -> None:
    assert advise_job_owner(claim(*cards).cards) == said


# --- bars -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "full"), [(0.0, 0), (0.001, 1), (0.5, 10), (0.999, BAR - 1), (1.0, BAR), (7.0, BAR)]
)
def test_a_bar_shows_what_is_not_nothing_and_not_everything(share: float, full: int) -> None:
    assert draw_bar(share) == "#" * full + "." * (BAR - full)


def test_a_line_over_time_is_blank_where_nothing_is_known() -> None:
    assert draw_sparkline([0, 10, 500, 1000, None, 1000]) == "_.+# #"


def test_numbers_are_said_with_the_digits_that_count() -> None:
    shares = [format_percent(s) for s in (None, 0, 0.001, 0.5, 0.999, 1)]
    assert shares == ["-", "0 %", "<1 %", "50 %", "99 %", "100 %"]
    assert [format_energy(j) for j in (None, 36_000, 7.2e6)] == ["-", "0.010 kWh", "2.000 kWh"]
    pairs = ((None, 5), (GIB, None), (GIB // 4, 80 * GIB), (0, 80 * GIB))
    peaks = [format_memory_peak(*pair) for pair in pairs]
    assert peaks == ["-", "1 GiB", "0.25 of 80 GiB", "0 of 80 GiB"]


# --- records ----------------------------------------------------------------------------------


NO_RECORDS: list[Any] = [
    *(None, [], "x", {}, {"version": 2}, {"version": 1}),
    *(record(card(0)) | {"devices": [5]}, record(card(0)) | {"claimed_at": None}),
    *(record(card(0)) | {"shapes": None}, record({"held_seconds": 5})),
]


@pytest.mark.parametrize("found", NO_RECORDS)
def test_what_is_no_record_is_refused(found: Any) -> None:
    with pytest.raises(ValueError):
        parse_reported_claim(found)
