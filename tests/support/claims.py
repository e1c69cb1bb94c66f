# SPDX-License-Identifier: Apache-2.0
"""Claims of Grid Engine jobs on a Box, and what becomes of their locks, for the tests of both."""

from __future__ import annotations

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.liveness import Judge
from gpulock.errors import Refusal
from gpulock.store.event_log import count_events, read_events
from gpulock.store.owner import Owner
from tests.support.trees import Box, bus, judging, record, soon


def never() -> Judge:
    pytest.fail("nothing had to be reaped")


def ask(box: Box, count: int = 2, **changes: object) -> Grant:
    node = box.node()
    return claim_devices(
        node, record(token="", devices=(), **changes), ClaimRequest(count), judging(node), soon()
    )


def pick(box: Box, device: str, job_id: str = "12") -> Grant:
    node = box.node()
    one = record(token="", devices=(), job_id=job_id)
    return claim_devices(node, one, ClaimRequest(1, (device,)), judging(node), soon())


def refused(box: Box, count: int = 2, **changes: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        ask(box, count, **changes)
    return caught.value


def ids(grant: Grant) -> list[str]:
    return [device.id for device in grant.devices]


def holder(box: Box, number: int) -> Owner:
    found = box.node().store.read(bus(number)).owner
    assert found is not None
    return found


def totals(box: Box) -> dict[str, str]:
    counted = count_events(read_events(str(box.lock)))
    return {key: f"{value:g}" for key, value in counted.items()}
