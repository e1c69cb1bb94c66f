# SPDX-License-Identifier: Apache-2.0
"""A power cut at any moment: no wrong grant, no line twice, no loss but the one that is documented.

tests/support/power_model.py says what a file system may leave.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import power_claims as claims
from tests.support import power_writes as writes
from tests.support.power_claims import Case
from tests.support.power_log import Log, Names, Sync
from tests.support.power_model import QUICK, WHOLE, Effort, check_remainders
from tests.sweep.tally import TALLY

pytestmark = pytest.mark.slow

Make = Callable[[Path, bool], Case]
TMPFS, DISK = False, True  # where LOCK_DIR is
BOTH: list[Make] = [
    *(claims.first_claim, claims.claim_to_history, claims.second_cut, claims.full_disk),
    *(claims.slurm_hooks, claims.sge_hooks),
    *(writes.quarantine_and_restore, writes.reserve_and_unreserve),
]
STATE_DIR_ALONE: list[Make] = [
    *(writes.quarantine_in_new_folder, writes.replaced_note, writes.remembered),
    *(writes.write_history, writes.behind_lines, writes.behind_half_a_line, writes.behind_zeros),
    *(writes.killed_author, writes.killed_before_name, writes.killed_and_nothing_new),
]
CASES = [
    *[(make, place) for make in BOTH for place in (TMPFS, DISK)],
    *[(make, TMPFS) for make in STATE_DIR_ALONE],
]
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]
FEWEST = 4  # remainders of the smallest case


def case_name(value: object) -> str:
    """Name a case, or where LOCK_DIR is."""
    return getattr(value, "__name__", "disk" if value else "tmpfs")


@pytest.mark.parametrize(
    "effort", [pytest.param(QUICK, id="quick"), pytest.param(WHOLE, id="whole", marks=SOAK)]
)
@pytest.mark.parametrize(("make", "kept"), CASES, ids=case_name)
def test_whatever_a_power_cut_leaves_the_node_comes_up_right(
    tmp_path: Path, make: Make, kept: bool, effort: Effort
) -> None:
    log, check = make(tmp_path, kept)
    count = check_remainders(log, effort, check)
    assert count >= FEWEST
    if effort is WHOLE:
        point = f"power cut: {case_name(make)}, {case_name(kept)}", "disk"
        TALLY.there[point] += count
        TALLY.tried[point] += count


def without_syncs(log: Log, name: str) -> Log:
    """Take the syncs of all files and folders of one name out of a log; "" is STATE_DIR."""
    last: dict[int, str] = dict.fromkeys(log.roots.values(), "")
    last |= {inode: one for (_, one), inode in log.names.items()}
    for event in log.events:
        if isinstance(event, Names):
            last |= {inode: one for _, one, inode in event.changes if inode is not None}
    kept = [e for e in log.events if not (isinstance(e, Sync) and last[e.inode] == name)]
    assert len(kept) < len(log.events), f"{name} is never synced"
    log.events[:] = kept
    return log


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (claims.first_claim, "boot_id"),
        (writes.quarantine_and_restore, "quarantine"),
        (writes.quarantine_in_new_folder, ""),
        (writes.reserve_and_unreserve, "quarantine"),
        (writes.replaced_note, "0000:01:00.0"),
        (writes.remembered, "cards"),
        (writes.remembered, "sge-rsmap"),
        (writes.remembered, ""),
        (writes.write_history, writes.MONTH),
        (writes.write_history, "history"),
        (writes.write_history, ""),
        (writes.behind_lines, writes.MONTH),
        (writes.killed_before_name, "history"),
    ],
)
def test_without_a_sync_that_a_promise_needs_a_remainder_breaks_it(
    tmp_path: Path, make: Make, name: str
) -> None:
    log, check = make(tmp_path, False)
    with pytest.raises(AssertionError, match="left: "):
        check_remainders(without_syncs(log, name), WHOLE, check, len(log.events) - 1)
