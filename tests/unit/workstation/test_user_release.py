# SPDX-License-Identifier: Apache-2.0
"""Whose a claim is that a user wants to give back, and which one is meant."""

from __future__ import annotations

import os

import pytest

from gpulock.errors import Refusal
from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from gpulock.workstation.peer import Peer, check_peer_may_hold
from gpulock.workstation.user_release import lock_matches_request, select_own_locks
from gpulock.workstation.wire import RELEASE, SocketRequest
from tests.support.trees import bus, record

UID = 1000


def held(**changes: object) -> Lock:
    fields: dict[str, object] = {"scheduler": "process", "pid": 600, "start": 7, "uid": UID}
    return Lock(bus(0), record(**{**fields, **changes}), "")


@pytest.mark.parametrize(
    ("changes", "meant"),
    [({}, True), ({"start": 8}, False), ({"pid": 601}, False), ({"scheduler": "sge"}, False)],
)
def test_a_claim_is_meant_by_the_pid_and_start_time_of_its_process(
    changes: dict[str, object], meant: bool
) -> None:
    assert lock_matches_request(held(**changes), SocketRequest(RELEASE, 600, 7)) == meant


@pytest.mark.parametrize("changes", [{"uid": UID + 1}, {"scheduler": "slurm"}])
def test_a_device_that_is_not_ones_own_claim_is_not_given_back(changes: dict[str, object]) -> None:
    request = SocketRequest(RELEASE, devices=(bus(0),))

    def meant(lock: Lock) -> bool:
        return lock_matches_request(lock, request)

    assert [lock.id for lock in select_own_locks({bus(0): held()}, meant, UID)] == [bus(0)]
    with pytest.raises(Refusal, match="is not yours"):
        select_own_locks({bus(0): held(**changes)}, meant, UID)


def test_a_claim_is_held_by_that_very_process_of_the_user() -> None:
    proc, me = Proc(), os.getpid()
    start, uid = proc.start(me), os.geteuid()
    peer = Peer(1, uid, -1)
    check_peer_may_hold(peer, proc, me, start)
    with pytest.raises(Refusal, match="belongs to another process"):
        check_peer_may_hold(peer, proc, me, start + 1)
    with pytest.raises(Refusal, match="is not yours"):
        check_peer_may_hold(Peer(1, uid + 1, -1), proc, me, start)
