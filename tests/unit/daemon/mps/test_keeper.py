# SPDX-License-Identifier: Apache-2.0
"""Which claims the MPS of a card serves, by a keeper that starts none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.mps.keeper import WATCH, CardMps, MpsKeeper
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from tests.support.journal import HeardJournal
from tests.support.trees import Box


@pytest.mark.parametrize(("uid", "served"), [(2001, {"t1"}), (2002, set[str]())])
def test_the_mps_of_a_user_serves_no_other_users_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, served: set[str]
) -> None:
    """It serves them no longer, and ends; theirs is started by the next reconcile."""
    node, journal = Box(tmp_path).node(), HeardJournal()
    device = node.devices()[0]
    keeper, one = MpsKeeper(journal), CardMps(node, device, 2001, journal)
    one.life = (WATCH for _ in range(2))
    wanted = {device.bus: (uid, {"t1"})}
    monkeypatch.setattr("gpulock.daemon.mps.keeper.select_mps_shares", lambda *_: wanted)
    report = ReconcileReport([], [])
    report.devices = [device]
    keeper.cards[device.bus] = one
    keeper.run(node, report, 1.0)
    assert one.wanted == served
