# SPDX-License-Identifier: Apache-2.0
"""Try mutants in copies of the tree: of the hot packages, or `make mutants WORDS="history gate"`.

Which ones are tried depends on their names alone, so that a change of the code changes few. Exits 1
where one survives.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from tests.mutants.measure import MEASURED, Measured  # noqa: E402 (the checkout is put on the path first)
from tests.mutants.operators import Mutant, generate_mutants  # noqa: E402
from tests.mutants.trial import KILLED, SURVIVED, WORK  # noqa: E402
from tests.steps import QUICK  # noqa: E402

HOT = ("alloc", "hooks", "isolation", "job", "node", "sge", "slurm", "store")
OTHERS = ("packaging", "repository", "support")  # tests of the checkout, not of the code
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__")


def main() -> int:
    """Try the mutants that are asked for, print what became of them; return the exit code."""
    parser = argparse.ArgumentParser(description="try mutants")
    parser.add_argument("words", nargs="*", help="files with one of these in their path")
    parser.add_argument("--count", type=int, default=300, help="how many are drawn")
    parser.add_argument("--seed", default="1", help="another word draws others")
    options = parser.parse_args()
    begun = time.monotonic()
    mutants = draw_mutants(list_mutants(options.words), options.seed, options.count)
    with tempfile.TemporaryDirectory(prefix="m.", dir=memory_folder()) as folder:
        results = try_mutants(mutants, ROOT, Path(folder), os.cpu_count() or 1)
    survivors = sorted(mutant for mutant, code in results if code == SURVIVED)
    for one in survivors:
        print(f"survived: {one.file}:{one.first} in {one.function}\n    {one.name}")
    late = sum(code not in (KILLED, SURVIVED) for _, code in results)
    killed, took = len(results) - len(survivors), time.monotonic() - begun
    print(f"{killed} of {len(results)} mutants killed, {late} by time, in {took:.0f} s")
    return 0 if results and not survivors else 1


def package_of(path: str) -> str:
    """Return which package a module, or a unit test, is of."""
    return path.removeprefix("tests/unit/").removeprefix("gpulock/").partition("/")[0]


def list_mutants(words: list[str]) -> list[Mutant]:
    """Return the mutants of the hot packages, or of files with one of the words in their path."""
    mutants: list[Mutant] = []
    for path in sorted(ROOT.glob("gpulock/*/**/*.py")):
        file = str(path.relative_to(ROOT))
        if any(word in file for word in words) or (not words and package_of(file) in HOT):
            mutants += generate_mutants(file, path.read_bytes())
    return mutants


def draw_mutants(mutants: list[Mutant], seed: str, count: int) -> list[Mutant]:
    """Return so many of the mutants."""

    def rank(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.file} {mutant.name}".encode()).digest()

    return sorted(mutants, key=rank)[:count]


def memory_folder() -> str | None:
    """Return where the copies are kept: in memory, where there is room."""
    done = subprocess.run([ROOT / "tests/memory.sh"], capture_output=True, text=True, check=True)
    return done.stdout.strip() or None


def try_mutants(
    mutants: list[Mutant], tree: Path, scratch: Path, jobs: int
) -> list[tuple[Mutant, int]]:
    """Return what becomes of each mutant: the tests are measured first, as the code is."""
    scratch.chmod(0o755)  # other users run some of it
    copies = [scratch / str(number) for number in range(jobs)]
    files = [str(f.relative_to(tree)) for f in sorted(tree.glob("tests/unit/*/**/test_*.py"))]
    files = [f for f in files if package_of(f) not in OTHERS]
    measured: list[Measured] = []

    def measure(copy: Path) -> None:
        shutil.copytree(tree, copy, ignore=LEFT_OUT, symlinks=True)
        out = copy.with_suffix(".measured")
        run_pytest(copy, "measure", files[copies.index(copy) :: jobs], {MEASURED: str(out)})
        measured.append(Measured(*json.loads(out.read_text())))

    def attempt(copy: Path) -> list[tuple[Mutant, int]]:
        work = copy.with_suffix(".work")
        share = mutants[copies.index(copy) :: jobs]
        work.write_text("\n".join([json.dumps([m, list_tests(m, measured)]) for m in share]))
        run_pytest(copy, "trial", files, {WORK: str(work)})
        lines = work.with_suffix(".results").read_text().splitlines()
        return [(Mutant(*row), code) for row, code in map(json.loads, lines)]

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(measure, copies))
        return [result for results in pool.map(attempt, copies) for result in results]


def run_pytest(copy: Path, plugin: str, files: list[str], environ: dict[str, str]) -> None:
    """Run pytest with one of the plugins here; raise SystemExit where a test fails."""
    options = ["-q", "-m", QUICK, "--hypothesis-seed", "1", "-p", "no:cacheprovider"]
    options += ["-p", f"tests.mutants.{plugin}", "--basetemp", f"{copy}.tmp"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": f"{copy}:{copy}/exporter", **environ}
        | ({"PYTHONDONTWRITEBYTECODE": "1"} if plugin == "trial" else {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the tests do not pass as the code is:\n{done.stdout}{done.stderr}")


def list_tests(mutant: Mutant, measured: list[Measured]) -> list[str]:
    """Return the tests that can see a mutant: those of its package first, the quickest first."""
    found: list[tuple[bool, bool, float, str]] = []
    for tests, seconds, starters, lines in measured:
        there = lines.get(mutant.file, {})
        runs: set[int] = set()
        # of what only a thread runs, which nobody measures: those that run its function
        for first in (mutant.first, mutant.function_line + 1):
            numbers = range(first, mutant.last + 1)
            runs = runs or {test for number in numbers for test in there.get(str(number), [])}
        for test in runs.union(starters):
            own = package_of(tests[test]) == package_of(mutant.file)
            if own or test in runs:
                found.append((not own, test not in runs, seconds[test], tests[test]))
    return [row[-1] for row in sorted(found)]


if __name__ == "__main__":
    sys.exit(main())
