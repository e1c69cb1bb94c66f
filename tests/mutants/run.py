# SPDX-License-Identifier: Apache-2.0
"""Apply each mutant to a copy of the tree and run its test: `make mutants [WORDS=locks]`.

Nothing is written into the checkout. Exits 1 where a mutant survives, where one that is said to be
equivalent is killed, and where a row no longer fits the code or its tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.mutants.table import ROOT, Mutant, mutate_text, read_mutants, why_no_such_test  # noqa: E402 (the checkout is put on the path first)

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__")
PASSED, FAILED = 0, 1  # exit codes of pytest
KILLED, EQUIVALENT, SURVIVED, WRONG = "killed", "equivalent", "survived", "wrong"
SECONDS = 120  # for one test: the slowest takes three
LATER = 3600  # seconds: a mutant's file is newer than what was compiled of the tree's


def main() -> int:
    """Run the rows that are asked for, print the counts; return the exit code."""
    parser = argparse.ArgumentParser(description="apply each mutant and run its test")
    parser.add_argument("words", nargs="*", help="only rows that have one of these words in them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    options = parser.parse_args()
    rows = [
        row for row in read_mutants() if any(w in f"{row}{row.test}" for w in options.words or [""])
    ]
    begun = time.monotonic()
    counts: dict[str, int] = dict.fromkeys((KILLED, EQUIVALENT, SURVIVED, WRONG), 0)
    with tempfile.TemporaryDirectory(prefix="gpulock-mutants-", dir=memory_folder()) as folder:
        for word, text in run_mutants(rows, ROOT, Path(folder), options.jobs):
            counts[word] += 1
            if word in (SURVIVED, WRONG):
                print(f"{word}: {text}", flush=True)
    told = ", ".join([f"{count} {word}" for word, count in counts.items()])
    print(f"{len(rows)} mutants: {told}, in {time.monotonic() - begun:.0f} s")
    return 1 if counts[SURVIVED] + counts[WRONG] or not rows else 0


def memory_folder() -> str | None:
    """Return where the copies are kept: in memory, where there is room."""
    done = subprocess.run([ROOT / "tests/memory.sh"], capture_output=True, text=True, check=True)
    return done.stdout.strip() or None


def run_mutants(
    rows: list[Mutant], tree: Path, scratch: Path, jobs: int
) -> Iterator[tuple[str, str]]:
    """Yield (what became of it, what to say of it) of each row, in order."""
    first = shutil.copytree(tree, scratch / "copy0", ignore=LEFT_OUT, symlinks=True)
    code, said = run_tests(dict.fromkeys([row.test for row in rows]), first, compiled=True)
    if code != PASSED:
        yield WRONG, f"the tests do not pass as the tree is:\n{said}"
        return
    copies = SimpleQueue[Path]()
    copies.put(first)
    for number in range(1, jobs):
        copies.put(shutil.copytree(first, scratch / f"copy{number}", symlinks=True))

    def judge(item: tuple[int, Mutant]) -> tuple[str, str]:
        copy = copies.get()
        try:
            return judge_mutant(item[1], copy, LATER * (item[0] + 1))
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(judge, enumerate(rows))


def judge_mutant(row: Mutant, copy: Path, later: int) -> tuple[str, str]:
    """Return what becomes of one mutant in a copy of the tree, which is as before afterwards."""
    if why := why_no_such_test(row, copy):
        return WRONG, why
    try:
        with mutated(copy / row.file, row, later):
            code, said = run_tests([row.test], copy)
    except (ValueError, SyntaxError) as fault:
        return WRONG, str(fault)
    if code not in (PASSED, FAILED):
        return WRONG, f"{row}\n{said}"
    if row.equivalent:
        return (EQUIVALENT, "") if code == PASSED else (WRONG, f"not equivalent: {row}\n{said}")
    return (KILLED, "") if code == FAILED else (SURVIVED, f"{row}\n    by {row.test}")


@contextmanager
def mutated(path: Path, row: Mutant, later: int) -> Generator[None]:
    """Change a file for the length of a `with` block.

    No two versions have one time: Python takes what it compiled for the file by that and its size.
    """
    text, info = path.read_text(), path.stat()
    try:
        path.write_text(mutate_text(text, row))
        os.utime(path, (info.st_mtime + later, info.st_mtime + later))
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def run_tests(tests: Iterable[str], copy: Path, compiled: bool = False) -> tuple[int, str]:
    """Run tests in a copy of the tree; return pytest's exit code and the end of what it said.

    With `compiled` Python keeps what it compiles.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTHONPATH": f"{copy}:{copy}/exporter"}
    environ["PYTEST_DEBUG_TEMPROOT"] = str(copy.parent)
    environ["PYTHONDONTWRITEBYTECODE"] = "" if compiled else "1"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, "-m", "", "--timeout", str(SECONDS), *tests],
            cwd=copy,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = process.wait()
        try:  # what a test forked, and could not end under this mutant
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        said.seek(0)
        return code, said.read().decode("utf-8", "replace")[-3000:]


if __name__ == "__main__":
    sys.exit(main())
