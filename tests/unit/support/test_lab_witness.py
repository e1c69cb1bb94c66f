# SPDX-License-Identifier: Apache-2.0
"""The labs' witness: it sees a device that was free while a process lived, and only that."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.store import owner
from gpulock.store.owner import Owner
from tests.labs.common.contention import find_cards_had_both_ways, replay
from tests.labs.daemon.daemon_witness import ROUNDING, Claim, Witness, claims_of

DEVICES = ("0000:06:00.0", "0000:07:00.0")


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    """Make the locks of one claim of two devices."""
    words = {"scheduler": "sge", "node": "n1", "boot_id": "b", "job_id": "7", "token": "aa"}
    record = Owner(devices=DEVICES, **words)
    for device in DEVICES:
        (tmp_path / device).mkdir()
        (tmp_path / device / "owner").write_text(owner.encode_owner(record))
    (found,) = claims_of(tmp_path, 7)
    return found


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does not end by itself."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def free(claim: Claim) -> None:
    for device in claim.devices:
        shutil.rmtree(claim.folder / device)


def test_a_device_that_is_free_while_a_process_lives_is_told(
    claim: Claim, process: subprocess.Popen[bytes]
) -> None:
    with (
        pytest.raises(AssertionError, match=f"while \\[{process.pid}\\] live"),
        Witness(claim, [process.pid]),
    ):
        free(claim)


def test_a_line_of_the_history_that_is_older_than_the_last_look_at_life_is_told(
    claim: Claim, process: subprocess.Popen[bytes]
) -> None:
    with Witness(claim, [process.pid]) as witness:
        pass
    witness.never_free_too_soon({"released_at": witness.lived})
    with pytest.raises(AssertionError):
        witness.never_free_too_soon({"released_at": witness.lived - 2 * ROUNDING})


SHARES = ["+ a 1/2 6", "+ b whole 0", "+ a 1/2 6", "- a 1/2 6", "- b whole 0", "- a 1/2 6"]


def test_contenders_that_keep_apart_are_counted() -> None:
    assert replay(SHARES, 2) == (3, "")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("+ a whole 6", "GPU 6 has 1 and 1 shares"),
        ("+ b 1/2 6", "shares of a and b"),
        ("+ a 2/2 6", "GPU 6 has 0 and 3 shares"),
        ("+ a 1/2,1/2 0,7", "GPU 0 has 1 and 1 shares"),
        ("- a 1/2 6", "GPU 6 is in use at the end"),
    ],
)
def test_contenders_that_meet_on_a_card_are_told(line: str, what: str) -> None:
    assert what in replay([*SHARES[:2], line, *SHARES[3:]], 2)[1]


def test_a_card_that_was_whole_and_shared_is_told() -> None:
    whole = ["+ c whole 6", "- c whole 6"]
    assert find_cards_had_both_ways([*whole, *SHARES]) == {"6"}
    assert find_cards_had_both_ways(SHARES) == set()
    assert find_cards_had_both_ways([*whole, "+ a 1/2 6", "- a 1/2 6"]) == set(), "one place"
