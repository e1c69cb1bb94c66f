# SPDX-License-Identifier: Apache-2.0
"""A card that hangs is left out, named, and tried again: the decisions, and real children."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from gpulock_exporter.driver_calls import (
    PAGE,
    CallNote,
    DriverCall,
    read_driver_call,
)
from gpulock_exporter.worker.supervisor import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    HungCard,
    Supervisor,
)

from tests.support.exporter_workers import LIMITS, Nest

CALL = DriverCall(10.0, 3, "0000:3b:00.0", "nvmlDeviceGetTemperature")


def test_a_note_tells_card_and_call_to_the_other_process_that_has_its_page() -> None:
    fd = os.memfd_create("page")
    note = CallNote(fd)
    told: list[DriverCall | None] = [read_driver_call(os.pread(fd, PAGE.size, 0))]
    note.enter_card(3, "0000:3b:00.0")
    for _ in range(2):
        note.name_call("nvmlDeviceGetTemperature")
        told.append(read_driver_call(os.pread(fd, PAGE.size, 0)))
        note.leave_card()
        told.append(read_driver_call(os.pread(fd, PAGE.size, 0)))
    os.close(fd)
    plain = [one and one._replace(since=10.0) for one in told]
    assert plain == [None, CALL, None, None, None], "a call of no card holds up all"


@pytest.mark.parametrize("page", [b"", b"\x01" * (PAGE.size - 1), bytes(PAGE.size)])
def test_a_page_that_is_not_whole_names_no_call(page: bytes) -> None:
    assert read_driver_call(page) is None


def test_what_a_page_says_is_a_line_whatever_a_worker_writes() -> None:
    call = read_driver_call(PAGE.pack(10.0, 3, b"\xff\n", b"a\nb"))
    assert call is not None and (call.bus + call.name).isprintable()


def test_pauses_grow() -> None:
    card = HungCard(CALL)
    now, pauses = 0.0, list[float]()
    for _ in range(12):
        card.leave_out(now, None)
        pauses.append(card.due - now)
        now = card.due
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE and pauses == sorted(pauses)


@pytest.mark.slow
def test_a_worker_cannot_take_the_page_from_under_its_supervisor(nest: Nest) -> None:
    body = 'for word; do page=${word#note=}; done; : > /proc/self/fd/$page; echo "$GOOD"; sleep 60'
    supervisor = nest.supervise(body)
    step_until(nest, lambda: supervisor.step(0.01))
    assert not is_calling(supervisor)


# a worker of two cards, of which the second hangs until `well` is there, in the page of its call
WORKER = """
cd ROOT
for word; do
    case $word in
        note=*) page=${word#note=} ;;
        without=1) alone=1 ;;
        looks=2) trial=1 ;;
    esac
done
echo "$*" >> starts
[ -e well ] && [ "$trial" ] && exit 0
[ "$alone" ] || [ -e well ] || { cat call 1<>/proc/self/fd/$page; exec sleep 60; }
while echo "$GOOD"; do sleep 0.02; done
"""


def step_until(nest: Nest, true: Callable[[], object]) -> None:
    """Step until something is so; no time passes on the supervisor's clock."""
    for _ in range(12_000):
        if true():
            return
        nest.made[-1].step(0.01)
    raise AssertionError(nest.made[-1].fault)


def is_calling(supervisor: Supervisor) -> bool:
    """Tell whether the worker has named a call."""
    worker = supervisor.worker
    return worker is not None and worker.call() is not None


def pass_time(nest: Nest, seconds: float) -> None:
    """Let time pass on the supervisor's clock, in which a worker sends its frames."""
    for _ in range(int(seconds)):
        nest.clock.now += 1
        step_until(nest, lambda: nest.made[-1].step(0.01))


def starts(nest: Nest) -> list[str]:
    """Return how each worker was started, without its page."""
    path = nest.root / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [" ".join(w for w in line.split() if not w.startswith("note=")) for line in lines]


@pytest.mark.slow
def test_the_next_worker_leaves_the_card_out_until_a_trial_of_its_own_succeeds(nest: Nest) -> None:
    supervisor = nest.supervise(WORKER.replace("ROOT", str(nest.root)))
    page = PAGE.pack(nest.clock.now, 1, b"0000:3b:00.0", b"nvmlDeviceGetTemperature")
    (nest.root / "call").write_bytes(page)
    step_until(nest, lambda: starts(nest) and is_calling(supervisor))
    nest.clock.now += 6
    step_until(nest, lambda: starts(nest) == ["", "without=1"])
    (card,) = supervisor.left_out().values()
    assert (card.call.card, card.call.name) == (1, "nvmlDeviceGetTemperature")
    (nest.root / "call").write_bytes(b"")  # the trial hangs before it names a call
    pass_time(nest, FIRST_PAUSE + 1)
    step_until(nest, lambda: starts(nest)[2:] == ["only=1 looks=2"])
    pass_time(nest, LIMITS.first + 1)
    step_until(nest, lambda: supervisor.cards[1].times >= 2)
    (nest.root / "well").touch()
    pass_time(nest, 2 * FIRST_PAUSE + 1)
    step_until(nest, lambda: starts(nest)[-1] == "")
    assert starts(nest)[-2] == "only=1 looks=2"
    assert supervisor.left_out() == {}
    step_until(nest, lambda: supervisor.fault == "")


def test_how_often_a_card_was_left_out_is_said_in_words() -> None:
    card = HungCard(CALL)
    card.leave_out(10.0, None)
    assert card.words() == "nvmlDeviceGetTemperature hangs in the driver"
    card.leave_out(20.0, CALL, signal.SIGABRT)
    assert card.words() == "nvmlDeviceGetTemperature ends its process by SIGABRT, 2 times by now"


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "out"), [("SEGV", True), ("KILL", False), ("TERM", False)])
def test_a_worker_that_a_card_crashes_is_replaced_at_once_by_one_without_it(
    nest: Nest, ends: str, out: bool
) -> None:
    body = WORKER.replace("exec sleep 60", f"kill -{ends} $$").replace("ROOT", str(nest.root))
    supervisor = nest.supervise(body)
    page = PAGE.pack(nest.clock.now, 1, b"0000:3b:00.0", b"nvmlDeviceGetTemperature")
    (nest.root / "call").write_bytes(page)
    if not out:  # whoever ended it, it was not the card
        step_until(nest, lambda: "ended with -" in supervisor.fault)
        assert (starts(nest), supervisor.left_out()) == ([""], {})
        return
    step_until(nest, lambda: starts(nest) == ["", "without=1"])
    (card,) = supervisor.left_out().values()
    assert card.words() == "nvmlDeviceGetTemperature ends its process by SIGSEGV"
    (nest.root / "call").write_bytes(b"")
    pass_time(nest, FIRST_PAUSE + 1)
    step_until(nest, lambda: supervisor.cards[1].times == 2)  # the trial crashes, too
    assert starts(nest) == ["", "without=1", "only=1 looks=2"]
    (nest.root / "well").touch()
    pass_time(nest, 2 * FIRST_PAUSE + 1)
    step_until(nest, lambda: starts(nest)[-1] == "")


@pytest.mark.slow
def test_a_worker_that_crashes_in_a_card_that_is_left_out_is_not_started_at_once(
    nest: Nest,
) -> None:
    body = WORKER.replace("exec sleep 60", "kill -SEGV $$").replace("ROOT", str(nest.root))
    supervisor = nest.supervise(body.replace("without=1", "without=2"))
    (nest.root / "call").write_bytes(PAGE.pack(nest.clock.now, 1, b"", b"nvmlX"))
    step_until(nest, lambda: len(starts(nest)) == 2)
    step_until(nest, lambda: supervisor.worker is None)
    for _ in range(20):
        supervisor.step(0.01)
    assert len(starts(nest)) == 2


@pytest.mark.slow
def test_a_call_that_has_only_begun_is_not_what_a_late_frame_waits_for(nest: Nest) -> None:
    supervisor = nest.supervise(WORKER.replace("ROOT", str(nest.root)))
    (nest.root / "call").write_bytes(PAGE.pack(nest.clock.now + 1e6, 1, b"", b"nvmlX"))
    step_until(nest, lambda: starts(nest))
    nest.clock.now += 100
    supervisor.step(0)
    assert "has not answered" in supervisor.fault and not supervisor.left_out()
