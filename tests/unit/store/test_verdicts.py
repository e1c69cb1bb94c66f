# SPDX-License-Identifier: Apache-2.0
"""The published verdicts: fresh, or not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.deadline import clock_boottime
from gpulock.store import verdicts
from gpulock.store.verdicts import ALIVE, DEAD, Verdict

BOOT = "this-boot"
FOUND = {"aa": Verdict(ALIVE, "its shepherd 5 runs"), "bb": Verdict(DEAD, "gone, a=b")}
FOUND["bb"].orphans = "process 7 has it open"


def fresh(folder: Path, now: float) -> dict[str, Verdict] | None:
    """Return the verdicts, None where they are not known or cannot be read."""
    try:
        return verdicts.read_dated_verdicts(str(folder), now, BOOT)[0]
    except ValueError:
        return None


def test_what_is_written_is_read_by_everybody(tmp_path: Path) -> None:
    strange = {"a=b\n": Verdict(DEAD, "gone")}
    verdicts.write_verdicts(str(tmp_path), {**FOUND, **strange}, BOOT)
    read = fresh(tmp_path, clock_boottime())
    assert read is not None
    assert {t: (v.state, v.proof, v.orphans) for t, v in read.items()} == {
        token: (v.state, v.proof, v.orphans) for token, v in FOUND.items()
    }
    assert (tmp_path / "verdicts").stat().st_mode & 0o777 == 0o644


def test_a_state_that_no_reconcile_writes_is_unknown(tmp_path: Path) -> None:
    now = 1000.0
    (tmp_path / "verdicts").write_text(
        f"{verdicts.VERSION_LINE}\nboot_id={BOOT}\nchecked_boottime={now:.3f}\naa=deadish x y\n"
    )
    read = fresh(tmp_path, now)
    assert read and (read["aa"].state, read["aa"].proof) == (verdicts.UNKNOWN, "x y")


def test_none_is_not_the_same_as_no_locks(tmp_path: Path) -> None:
    assert fresh(tmp_path, clock_boottime()) is None
    verdicts.write_verdicts(str(tmp_path), {}, BOOT)
    assert fresh(tmp_path, clock_boottime()) == {}


def test_verdicts_of_another_boot_are_not_known(tmp_path: Path) -> None:
    verdicts.write_verdicts(str(tmp_path), FOUND, "an-earlier-boot")
    assert fresh(tmp_path, clock_boottime()) is None
    assert verdicts.read_dated_verdicts(str(tmp_path), clock_boottime(), BOOT) == (None, None)


@pytest.mark.parametrize(
    ("boot", "age", "known"),
    [
        *((BOOT, age, True) for age in (0, verdicts.FRESH)),
        *((BOOT, age, False) for age in (verdicts.FRESH + 1, -5, float("nan"), float("-inf"))),
        ("another", 0, False),
    ],
)
def test_an_old_verdict_and_one_of_the_future_or_another_boot_are_not_known(
    tmp_path: Path, boot: str, age: float, known: bool
) -> None:
    (tmp_path / "verdicts").write_text(
        f"{verdicts.VERSION_LINE}\nboot_id={boot}\nchecked_boottime={1000 - age:.3f}\naa=alive x\n"
    )
    assert (fresh(tmp_path, 1000.0) is not None) is known
