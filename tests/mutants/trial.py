# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: it collects the tests once, and runs some of them for each mutant.

Each run is a fork, so that a mutant costs no start and no import. There the changed function gets
its new code; its file is changed too, for the processes that tests start.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.mutants.operators import Mutant

ROOT = Path(__file__).resolve().parents[2]
WORK = "GPULOCK_MUTANTS"  # names a file: a line of JSON for each mutant and its tests
SURVIVED, KILLED = range(2)  # exit codes of a fork; minus a signal is one too
TIMEOUT = -signal.SIGKILL
SECONDS = 600  # for a fork; pytest-timeout ends each of its tests long before
MEMORY = 4 << 30  # bytes
Functions = dict[tuple[str, int], list[FunctionType]]  # by file and first line


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run the tests of each mutant, and write what becomes of it."""
    items = {item.nodeid: item for item in session.items}
    functions = list_functions_of_code()
    work = Path(os.environ[WORK])
    with work.with_suffix(".results").open("w") as results:
        for line in work.read_text().splitlines():
            row, tests = json.loads(line)
            code = try_mutant(session, Mutant(*row), functions, [items[test] for test in tests])
            results.write(json.dumps([row, code]) + "\n")
            results.flush()
    return True


def list_functions_of_code() -> Functions:
    """Return the functions that were made of each place of the code, however they are wrapped."""
    functions: Functions = {}
    gc.unfreeze()
    for one in gc.get_objects():
        if isinstance(one, FunctionType):
            place = (one.__code__.co_filename, one.__code__.co_firstlineno)
            functions.setdefault(place, []).append(one)
    gc.freeze()  # a fork that looks for garbage would copy all of it
    return functions


def try_mutant(
    session: pytest.Session, mutant: Mutant, functions: Functions, tests: list[pytest.Item]
) -> int:
    """Return what becomes of a mutant; its file is as before afterwards."""
    path = ROOT / mutant.file
    source, info = path.read_bytes(), path.stat()
    changed = mutant.apply(source)
    path.write_bytes(changed)
    child = os.fork()
    if not child:
        code = KILLED
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            exchange_code(mutant, compile(changed, path, "exec", dont_inherit=True), functions)
            code = run_tests(session, tests)
        finally:
            os._exit(code)
    try:
        return wait_for(child)
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def exchange_code(mutant: Mutant, module: CodeType, functions: Functions) -> None:
    """Give each function that was made of the mutant's place its new code."""
    for code in list_code(module):
        if (code.co_firstlineno, code.co_name) == mutant.place:
            for function in functions.get((str(ROOT / mutant.file), mutant.function_line), []):
                function.__code__ = code


def list_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of each function and class within a module's."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from list_code(inner)


def run_tests(session: pytest.Session, tests: list[pytest.Item]) -> int:
    """Run tests up to the first that fails."""
    for item, following in zip(tests, [*tests[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return KILLED
    return SURVIVED


def wait_for(child: int) -> int:
    """Return a child's exit code, or minus the signal that ended it."""
    ended = os.pidfd_open(child)
    try:
        select.select([ended], [], [], SECONDS)
    finally:
        os.close(ended)
    try:  # whatever a test has started, and could not end
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
