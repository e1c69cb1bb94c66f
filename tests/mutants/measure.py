# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: it notes which lines each test runs, and which tests start processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = "GPULOCK_MUTANTS_MEASURED"  # names the file that is written
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "subprocess.Popen")


class Measured(NamedTuple):
    """The tests, their seconds, those that start processes, and those that run each line."""

    tests: list[str]
    seconds: list[float]
    starters: list[int]
    lines: dict[str, dict[str, list[int]]]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Run the tests while coverage looks, and write what it saw."""
    seen = coverage.Coverage(data_file=None, include=[f"{ROOT}/gpulock/*"], config_file=False)
    seen.set_option("run:core", "ctrace")
    measured = Measured([], [], [], {})
    session.config.pluginmanager.register(EachTest(seen, measured))
    seen.start()
    result = yield
    seen.stop()
    data = seen.get_data()
    for file in data.measured_files():
        measured.lines[os.path.relpath(file, ROOT)] = {
            str(line): [int(number) for number in numbers if number]
            for line, numbers in data.contexts_by_lineno(file).items()
        }
    Path(os.environ[MEASURED]).write_text(json.dumps(measured))
    return result


class EachTest:
    """Tells coverage which test runs, and notes what else is asked of it."""

    def __init__(self, seen: coverage.Coverage, measured: Measured) -> None:
        self._seen = seen
        self._measured = measured
        self._started = False
        sys.addaudithook(self._note_event)

    def _note_event(self, event: str, _arguments: tuple[object, ...]) -> None:
        if event in STARTS:
            self._started = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note one test."""
        number = len(self._measured.tests)
        self._seen.switch_context(str(number))
        begun, self._started = time.perf_counter(), False
        result = yield
        self._measured.tests.append(item.nodeid)
        self._measured.seconds.append(time.perf_counter() - begun)
        self._measured.starters.extend([number] if self._started else [])
        return result
