# SPDX-License-Identifier: Apache-2.0
"""What `make test`, `make labs` and `make soak` run: each step, and how long it usually takes."""

from __future__ import annotations

import os
from typing import NamedTuple

CELL = "popen//python=/checkout/tests/root/cell.sh"
QUICK = "not slow and not install and not soak and not lab and not sweep"
CORES = os.cpu_count() or 1
# What judges the source, its units and its scripts says the same on every Python.
SOURCE_ALONE = (
    "exporter/metrics/test_rules.py",
    "install/systemd/test_units.py",
    "repository",
)

# Scenarios of both schedulers are in tests/labs/both: each step has those of its own scheduler.
SGE = ("lab and not slurm", "tests/labs/sge", "tests/labs/both")
SLURM = ("lab and not sge", "tests/labs/slurm", "tests/labs/both")
SHORT = ("short and not sge", *SLURM[1:])

SITE = "tests/install/test_site.py"
ARM64 = "tests/install/test_arm64.py"  # its root alone has QEMU
PROCESS_KINDS = "tests/labs/isolation/test_process_kinds.py"
INSTALLED = (
    "tests/labs/systemd/test_locks.py::test_installed_means_started_enabled_and_approved_by_doctor"
)


class Step(NamedTuple):
    """A command; `is_busy` has a core for itself, others wait for real daemons most of the time."""

    name: str
    words: tuple[str, ...]
    seconds: int  # on two cores, as a first guess
    root: str = "bookworm"
    is_busy: bool = True
    needs_root: bool = False
    env: tuple[tuple[str, str], ...] = ()
    program: str = "sh"  # what it needs of a machine that is no private root


def pytest(*words: str) -> tuple[str, ...]:
    """Return a command of pytest, without a cache: several run in one checkout.

    Its time limit ends what hangs, and judges nothing: beside many others all takes longer.
    """
    return ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "400", *words)


def unit(number: int, count: int) -> Step:
    """Return one of several parts of the quick unit tests, by files."""
    files = f"$(find tests/unit -name 'test_*.py' | sort | awk 'NR % {count} + 1 == {number}')"
    words = ("bash", "-c", f'exec "$@" {files}', "unit", *pytest("-m", QUICK))
    return Step(f"unit {number}/{count}", words, 60)


def in_cells(name: str, count: int, seconds: int, *words: str, root: str = "labs") -> Step:
    """Return a lab in several cells of the root: a file of tests has one of them for itself."""
    limits = ("--timeout", "600", "-o", "faulthandler_timeout=900", "--maxfail", "10")
    workers = ("--tx", f"{count}*{CELL}", "--dist", "loadfile", "--basetemp", "/tmp/pytest")
    command = ("python", "-m", "pytest", "-v", *pytest(*limits, *workers)[4:], *words)
    return Step(name, command, seconds, root, is_busy=False, needs_root=True)


def python(root: str, seconds: int) -> Step:
    """Return the demo and the quick unit tests on the Python of a release."""
    left_out = " ".join(f"--ignore=tests/unit/{path}" for path in SOURCE_ALONE)
    tests = f'exec "$@" {left_out} tests/unit'
    words = (
        "bash",
        "-c",
        f"python -m tests.demo >/dev/null && {tests}",
        "python",
        *pytest("-m", QUICK),
    )
    return Step(f"Python of {root}", words, seconds, root, needs_root=True)


TEST = (
    Step("format, lint, types", ("bash", "-c", "ruff format --check && ruff check && mypy"), 20),
    *(unit(number, CORES) for number in range(1, CORES + 1)),
    Step("slow", pytest("-m", "slow and not soak and not giant", "tests/unit"), 150),
    Step(
        "exporter",
        pytest("-n", "4", "--dist", "loadfile", "tests/exporter", "tests/gpu"),
        90,
        is_busy=False,
    ),
    Step(
        *("world", pytest("-m", "not soak", "tests/world"), 60),
        env=(("GPULOCK_WORLD_SCHEDULES", "1200"),),
    ),
    Step(
        "sweep",
        pytest("-m", "sweep", "--timeout", "1500", "tests/sweep"),
        120,
        env=(("GPULOCK_SWEEP_SAMPLE", "768"),),
        program="strace",
    ),
    in_cells(
        *("Grid Engine", 1, 90, "-m", SGE[0], "tests/labs/sge/test_jobs.py"),
        *("tests/labs/both/test_jobs.py", "tests/labs/both/test_ends.py"),
        root="bookworm",
    ),
    in_cells(
        *("Slurm", 1, 120, "-m", SLURM[0], "tests/labs/slurm/test_jobs.py"),
        *("tests/labs/both/test_jobs.py", "tests/labs/slurm/test_refusals.py"),
        root="bookworm",
    ),
    in_cells(
        *("systemd, Prometheus", 2, 60, "-m", "lab", INSTALLED),
        "tests/labs/prometheus/test_prometheus.py",
        root="bookworm",
    ),
)
LABS = (
    in_cells("Grid Engine", 4, 700, "-m", *SGE),
    in_cells("Slurm", 3, 500, "-m", *SLURM),
    in_cells(
        *("other labs", 3, 400, "-m", "lab", "--ignore=tests/labs/sge"),
        *("--ignore=tests/labs/slurm", "--ignore=tests/labs/both"),
        *("--ignore=tests/labs/isolation", "tests/labs"),
    ),
    Step(
        *("process kinds", pytest("-m", "lab", PROCESS_KINDS), 10, "labs", True, True),
        env=(("PIDS", "host"),),
    ),
    in_cells("Slurm of trixie", 1, 200, "-m", *SHORT, root="trixie"),
    Step(
        *("packages", pytest("-m", "install and not soak", "tests"), 100, "labs", True, True),
        env=(("NETWORK", "host"),),
    ),
    Step("giants", pytest("-m", "giant and not soak", "tests/unit"), 150),
    Step("sweep", pytest("-m", "sweep", "--timeout", "1500", "tests/sweep"), 400),
    python("bullseye", 120),
    python("trixie", 120),
    in_cells("isolation", 2, 150, "-m", "lab", f"--ignore={PROCESS_KINDS}", "tests/labs/isolation"),
)
FULL = (("GPULOCK_SOAK", "1"),)
SOAK = (
    *(
        Step(
            f"booted {seconds} s ago",
            pytest("-m", QUICK, "tests/unit", "tests/exporter", "tests/gpu"),
            300,
            needs_root=True,
            env=(("UPTIME", str(seconds)),),
        )
        for seconds in (30, 600)
    ),
    Step(
        "world",
        pytest("-n", "auto", "--timeout", "0", "tests/world"),
        4000,
        env=(("GPULOCK_WORLD_SCHEDULES", "1000000"), ("GPULOCK_WORLD_ALL", "1")),
    ),
    Step(
        "full counts",
        pytest("-m", "(lab or sweep or soak) and not install", "--timeout", "14400", "tests"),
        9000,
        "labs",
        needs_root=True,
        env=FULL,
    ),
    in_cells("Slurm of trixie", 1, 1000, "-m", *SLURM, root="trixie"),
    in_cells("Slurm of sid", 1, 1000, "-m", *SLURM, root="sid"),
    in_cells(
        *("Grid Engine, version 2 alone", 1, 200, "-m", SGE[0], "tests/labs/sge/test_isolation.py"),
        *("tests/labs/sge/test_passed_device.py", "tests/labs/both/test_isolation.py"),
    )._replace(env=(("CGROUPS", "2"),)),
    in_cells("version 2 alone", 1, 200, "-m", *SHORT, root="sid")._replace(env=(("CGROUPS", "2"),)),
    *(
        Step(
            # `make docs` would set up the checkout's .venv with this root's Python
            *(
                f"packages on {root}",
                pytest("-m", "install", "-k", "not lintian", f"--ignore={SITE}", "tests/install"),
                200,
                root,
            ),
            *(True, True),
            env=(("NETWORK", "host"), *FULL),
        )
        for root in ("bullseye", "trixie")
    ),
    python("sid", 120),
    Step(
        *("packages", pytest("-m", "install", f"--ignore={ARM64}", "tests"), 600, "labs"),
        *(True, True),
        env=(("NETWORK", "host"), *FULL),
    ),
    Step(
        *("arm64", pytest("-m", "install", ARM64), 90, "arm64", True, True),
        env=(("NETWORK", "host"),),
    ),
)
PLANS = {"test": TEST, "labs": LABS, "soak": SOAK}
