# SPDX-License-Identifier: Apache-2.0
"""A driver that hangs holds up nobody, and never makes a device look free."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpulock.daemon.reconcile.reconcile import DaemonNode, reconcile_locks
from gpulock.errors import BROKEN, Refusal
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from tests.support.locks import place_lock
from tests.support.trees import NAME, Box, bus, judge_of, record, soon


class Hanging(DaemonNode):
    """A node whose driver answers when the test lets it."""

    def __init__(self, box: Box, patience: float) -> None:
        super().__init__(Settings(dict(box.settings)), NAME, patience)
        self.ends = os.pipe()
        self.asked = 0

    def ask_driver(self) -> list[Device]:
        self.asked += 1
        if os.read(self.ends[0], 1) == b"!":
            raise Refusal(BROKEN, "no NVIDIA driver", "load it")
        return super().ask_driver()

    def answer(self, how: bytes = b".") -> None:
        os.write(self.ends[1], how)


@pytest.fixture
def node(box: Box) -> Iterator[Hanging]:
    made = Hanging(box, 10.0)
    yield made
    made.answer(b"..")  # no thread of ours waits when the test is over
    os.close(made.ends[1])


def silent(node: Hanging) -> Refusal:
    with pytest.raises(Refusal) as caught:
        node.devices()
    return caught.value


def test_when_it_comes_back_it_is_asked_afresh(box: Box) -> None:
    node = Hanging(box, 0.001)
    silent(node)
    box.gpu(bus(4), 4)
    asking = node.caller.late
    assert asking is not None
    node.answer(b"..")
    assert asking.wait(10.0)
    node.caller.patience = 10.0
    assert len(node.devices()) == 5
    assert node.asked == 2


def hold(box: Box, number: int, pid: int, minor: str) -> None:
    one = record(pid=pid, token=f"t{pid}", devices=(bus(number),), minors=(minor,))
    place_lock(box.node().store, bus(number), one)


@pytest.mark.parametrize(
    ("opens", "minor", "act"), [(True, "0", "orphans"), (False, "", "held"), (False, "0", "freed")]
)
def test_behind_a_silent_driver_a_device_that_is_open_or_may_be_is_not_freed(
    box: Box, opens: bool, minor: str, act: str
) -> None:
    node = Hanging(box, 0.001)
    hold(box, 0, 501, minor)
    if opens:
        box.proc.add(900, fds={3: box.dev / "nvidia0"})
    report = reconcile_locks(node, judge_of(node), soon())
    assert [outcome.act for outcome in report.outcomes] == [act]
    assert "does not answer" in report.driver
    node.answer()


def test_a_card_that_fell_off_the_bus_and_is_open_is_not_freed(box: Box) -> None:
    hold(box, 3, 501, "3")
    (box.driver / "gpus" / bus(3) / "information").unlink()
    box.proc.add(900, fds={3: box.dev / "nvidia3"})
    report = reconcile_locks(box.node(), judge_of(box.node()), soon())
    assert [outcome.act for outcome in report.outcomes] == ["orphans"]


def test_what_only_nvml_tells_is_added_but_is_no_word_of_the_driver(
    node: Hanging, box: Box
) -> None:
    box.gpu(bus(0), 0, "GPU-????????-????-????-????-????????????")
    box.inventory(f"gpu.{bus(0)}.uuid=GPU-1234", f"gpu.{bus(0)}.memory_mib=32768")
    node.answer()
    found = node.devices()[0]
    assert (found.uuid, found.memory_mib) == ("GPU-1234", 32768)
    assert node.cards[bus(0)].uuid == ""
    node.answer(b"!")
    silent(node)
    assert node.cards == {}, "what cannot be asked confirms nothing"
