# SPDX-License-Identifier: Apache-2.0
"""How much each process of a shared card worked, by the driver's samples of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nvml.double import ERROR_NOT_SUPPORTED, ERROR_UNKNOWN, Double
from tests.support.exporter_nvml import Eye, device

START = 1_700_000_000_000_000  # microseconds, of whatever clock
CARD = "0000:06:00.0"
CALL = "nvmlDeviceGetProcessUtilization"


class Node:
    """A card that is shared, and what the driver says of its processes."""

    def __init__(self, nvml: Double, eye: Eye) -> None:
        self.nvml = nvml
        self.eye = eye
        self.at = START

    def say(self, *work: tuple[int, int]) -> None:
        """Let processes have worked: pid and percent."""
        self.at += 1_000_000
        words = [f"{pid}:{percent}:0:0:0:{self.at + pid}" for pid, percent in work]
        self.nvml.set("gpu0.process_utilization", ",".join(words) or "none")

    def look(self, *work: tuple[int, int], after: float = 1.0) -> dict[str, float] | None:
        """Return what a look tells when processes have worked."""
        self.say(*work)
        frame = self.eye.look(after=after, shared=[CARD])
        self.failures = frame.failures
        return device(frame).process_use


@pytest.fixture(params=["390.157", "470.256.02", "535.54.03", "580.95.05"])
def driver(request: pytest.FixtureRequest) -> str:
    """Give each age of driver."""
    return str(request.param)


@pytest.fixture
def node(tmp_path: Path, driver: str) -> Iterator[Node]:
    """Give a card on a driver."""
    with Double(tmp_path / "nvml", preset="dgx1", driver=driver, gpus=2) as nvml, Eye(nvml) as eye:
        yield Node(nvml, eye)


def test_each_process_of_a_shared_card_says_how_much_it_worked(node: Node) -> None:
    assert node.look((77, 90), (78, 5)) is None, "the first answer is of the whole buffer"
    assert node.look((77, 40), (78, 20)) == {"77": 0.4, "78": 0.2}
    assert node.look((78, 100)) == {"78": 1.0}
    assert node.look() == {}
    assert node.failures == {}


def test_only_a_card_that_is_shared_is_asked(node: Node) -> None:
    node.look((77, 40))
    frame = node.eye.look(shared=["0000:07:00.0"])
    assert device(frame, 0).process_use is None
    assert device(frame, 1).process_use is None, "it has said nothing yet"
    assert device(node.eye.look(shared=["0000:07:00.0"]), 1).process_use == {}


@pytest.mark.parametrize("driver", ["580.95.05"], indirect=True)
class TestOfADriver:
    """What one driver tells the others would as well."""

    def test_after_a_gap_an_answer_is_of_longer_than_the_look(self, node: Node) -> None:
        node.look((77, 40))
        assert node.look((77, 40)) == {"77": 0.4}
        assert node.look((77, 40), after=10.0) is None
        assert node.look((77, 30)) == {"77": 0.3}

    def test_what_was_told_before_is_not_told_again(self, node: Node) -> None:
        node.look((77, 40))
        node.look((77, 50))
        frame = node.eye.look(shared=[CARD])
        assert device(frame).process_use == {}

    def test_a_time_stamp_from_the_future_is_got_over(self, node: Node) -> None:
        node.look((77, 40))
        node.at += 10**12
        node.look((77, 40))
        node.at -= 10**12
        looks = [node.look((77, 40)) for _ in range(6)]
        assert looks[0] == {} and looks[-1] == {"77": 0.4}

    @pytest.mark.parametrize("work", [(77, 101), (77, 4_000_000_000), (0, 50)])
    def test_what_cannot_be_is_not_believed(self, work: tuple[int, int], node: Node) -> None:
        node.look((78, 40))
        assert node.look((78, 40), work) is None
        assert "cannot work" in node.failures["utilization"]
        assert node.look((78, 40)) == {"78": 0.4}

    def test_a_list_that_grows_is_asked_for_again(self, node: Node) -> None:
        node.look((77, 40))
        many = [(pid, 1) for pid in range(100, 190)]
        assert node.look(*many) == {str(pid): 0.01 for pid, _ in many}

    def test_a_driver_that_cannot_say_says_nothing_of_anybody(self, node: Node) -> None:
        node.nvml.fail(CALL, ERROR_NOT_SUPPORTED)
        assert node.look((77, 40)) is None
        assert node.failures == {}

    def test_a_call_that_fails_is_told(self, node: Node) -> None:
        node.look((77, 40))
        node.nvml.fail(CALL, ERROR_UNKNOWN)
        assert node.look((77, 40)) is None
        assert "utilization" in node.failures
