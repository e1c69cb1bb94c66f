# SPDX-License-Identifier: Apache-2.0
"""What every test starts from, whatever started pytest; and what is said at the end of a run."""

from __future__ import annotations

import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.sweep.tally import TALLY
from tests.world.counts import SCHEDULES, world_lines

DAY = 86400.0
NOBODY = 65534
STORY = ("Tried: ", "Stopped by: ")  # the docstring of an attack
LEFT_OUT = pytest.StashKey[dict[str, int]]()
NEEDS_ROOT = "need root: `make test` as root runs them"
NEEDS_MINUTES = "wait for minutes in a lab: `make soak` runs them"
NEEDS_REACH = "run this checkout as another user, who cannot reach it"


def ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: a handler is not inherited by a program, SIG_IGN is."""


def restore_signals() -> None:
    """Undo what nohup and a shell's `&` leave ignored: a program under test would inherit it.

    A hang-up stays without effect on pytest itself.
    """
    handlers: dict[int, Callable[[int, FrameType | None], object] | signal.Handlers] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: ignore_signal,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


restore_signals()
# A user's own may be 002, and then nothing that a test makes may be a lock directory.
os.umask(0o022)


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a folder of its own, and hypothesis its one profile.

    pytest begins by closing /tmp/pytest-of-USER, in which another run's user may be at work. A lab
    of another Python has no hypothesis. What that says of its generator on 3.14 is false, and
    passes.
    """
    if not hasattr(config, "workerinput") and not config.option.basetemp:
        folder = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        config.option.basetemp = tempfile.mkdtemp(prefix="gpulock-tests-", dir=folder)
    if sys.version_info >= (3, 14):
        config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random`")
    if config.pluginmanager.hasplugin("hypothesispytest"):
        load_hypothesis_profile()


def load_hypothesis_profile() -> None:
    """Let one commit always try the same examples, however slow the machine; a soak tries others.

    The phase that explains a failure is left out: it takes a minute.
    """
    from hypothesis import HealthCheck, Phase, settings  # noqa: TID251 (the profile)

    settings.register_profile(
        "gpulock",
        deadline=None,
        derandomize=os.environ.get("GPULOCK_SOAK") != "1",
        database=None,
        print_blob=True,
        phases=[phase for phase in Phase if phase is not Phase.explain],
        suppress_health_check=[HealthCheck.too_slow],  # by the wall clock of a busy machine
    )
    settings.load_profile("gpulock")


def pytest_runtest_setup() -> None:
    """Take hypothesis out of the garbage collection, where Python gives no headroom for it.

    A collection at the recursion limit, as in a test of deep JSON, would abort Python 3.9.
    """
    if sys.version_info < (3, 11):
        gc.callbacks.clear()


@pytest.fixture
def up_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process see a machine that was booted a day earlier than it was."""
    clock = time.clock_gettime

    def later(which: int) -> float:
        return clock(which) + DAY

    monkeypatch.setattr(time, "clock_gettime", later)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    """Let Python look for no garbage in what is made here: nothing of it goes before the end.

    To look costs a third of this time, and a tenth of the time of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def attack_story(item: pytest.Item) -> list[str]:
    """Return the lines in which an attack says what it tried and what stopped it."""
    text = inspect.getdoc(getattr(item, "obj", None)) or ""
    return [line for line in text.splitlines() if line]


def has_story(item: pytest.Item) -> bool:
    """Return whether a test is no attack, or says what it tried and what stopped it."""
    tried, stopped = ("\n".join(attack_story(item)).find(word) for word in STORY)
    return item.get_closest_marker("attack") is None or 0 == tried < stopped


def unreachable_folder(path: Path, uid: int) -> Path | None:
    """Return the first folder above `path` that a user without groups may not enter."""
    for folder in reversed(path.resolve().parents):
        status = folder.stat()
        if not status.st_mode & (0o100 if status.st_uid == uid else 0o001):
            return folder
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this user cannot run, and count it; a lab says itself that it needs root."""
    if mute := [item.nodeid for item in items if not has_story(item)]:
        raise pytest.UsageError(f"attacks that do not say {' and '.join(STORY)}: {mute}")
    left = config.stash.setdefault(LEFT_OUT, {})
    barred: dict[str, str] = {}
    if os.geteuid() != 0:
        barred = {"root": NEEDS_ROOT, "another_user": NEEDS_ROOT}
    elif folder := unreachable_folder(Path(__file__), NOBODY):
        barred["another_user"] = f"{NEEDS_REACH} ({folder} is closed)"
    if os.environ.get("GPULOCK_SOAK") != "1":
        barred["minutes"] = NEEDS_MINUTES
    kept: list[pytest.Item] = []
    gone: list[pytest.Item] = []
    for item in items:
        why = next((why for name, why in barred.items() if item.get_closest_marker(name)), None)
        (kept if why is None else gone).append(item)
        if why is not None:
            left[why] = left.get(why, 0) + 1
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Say of each attack what it tried and what stopped it, where attacks alone are run."""
    found = item.config.pluginmanager.get_plugin("terminalreporter")
    terminal: pytest.TerminalReporter | None = found
    if terminal is not None and item.config.getoption("markexpr") == "attack":
        terminal.write_line("")
        for line in attack_story(item):
            terminal.write_line(f"  {line}")
    return (yield)


def pytest_testnodedown(node: object) -> None:
    """Take over what a worker of xdist left out, as they all do, and what it played."""
    config: pytest.Config = getattr(node, "config")  # noqa: B009  # xdist has no types
    nothing: dict[str, dict[str, int]] = {}
    output: dict[str, dict[str, int]] = getattr(node, "workeroutput", nothing)
    config.stash.setdefault(LEFT_OUT, {}).update(output.get("left_out", {}))
    SCHEDULES.update(output.get("schedules", {}))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Say last of all what was left out, or played: the last line is what make shows."""
    left = session.config.stash.setdefault(LEFT_OUT, {})
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output.update(left_out=left, schedules=dict(SCHEDULES))
    yield
    found = session.config.pluginmanager.get_plugin("terminalreporter")
    terminal: pytest.TerminalReporter | None = found
    if output is None and session.exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(session.config.option.basetemp, ignore_errors=True)
    if output is None and terminal is not None and left:
        passed = len(terminal.stats["passed"]) if "passed" in terminal.stats else 0
        words = [f"{count} {why}" for why, count in left.items()]
        terminal.write_line(f"{passed} passed; left out: {'; '.join(words)}")
    if output is None and terminal is not None:
        for line in world_lines():
            terminal.write_line(line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many points were tried: a sweep that tried none proves nothing."""
    for line in TALLY.lines():
        terminalreporter.write_line(line)
