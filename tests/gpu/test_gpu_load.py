# SPDX-License-Identifier: Apache-2.0
"""The load of `make gpu-check` on a CUDA driver of ours, which checks every argument it is given.

Whether a real driver takes the kernel cannot be seen here; a real compiler for it did (README.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.load import LAUNCH, MOST_ROUNDS, Cuda, rest, rounds_for

ROOT = Path(__file__).resolve().parents[2]
CALLS = (
    *("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
    *("cuCtxSetCurrent", "cuModuleLoadDataEx", "cuModuleGetFunction", "cuMemAlloc_v2"),
    *("cuMemsetD8_v2", "cuLaunchKernel", "cuCtxSynchronize"),
)
GIVEN_BACK = ["cuMemFree_v2", "cuModuleUnload", "cuDevicePrimaryCtxRelease_v2"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the driver; return its folder."""
    folder = tmp_path_factory.mktemp("cuda")
    source = ROOT / "tests/gpu/fake_cuda.c"
    library = folder / "libcuda.so.1"
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return folder


def run(driver: Path, log: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the load on the driver."""
    given = {"LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_LOG": str(log), **env}
    program = [sys.executable, str(ROOT / "tests/gpu/load.py"), "--seconds", "0.5", *words]
    return subprocess.run(
        program,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_it_says_that_it_runs_and_gives_back_what_it_took(driver: Path, tmp_path: Path) -> None:
    """`running` is what the check waits for."""
    log = tmp_path / "log"
    done = run(driver, log, "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "running"
    assert "capability 9.0" in done.stdout
    calls = log.read_text().split()
    assert calls[-3:] == GIVEN_BACK
    assert Counter(calls)["cuLaunchKernel"] == Counter(calls)["cuCtxSynchronize"]


def test_it_rests_so_that_its_share_is_what_was_wanted() -> None:
    """By what a launch really took."""
    assert rest(0.1, 1.0) == 0
    assert rest(0.1, 0.5) == pytest.approx(0.1)
    assert rest(0.12, 0.25) == pytest.approx(0.36)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_is_named_with_the_drivers_words(
    driver: Path, tmp_path: Path, call: str
) -> None:
    """Exit code 1, and no `running`."""
    done = run(driver, tmp_path / "log", "0", FAKE_CUDA_FAIL=call)
    assert done.returncode == 1
    assert f"{call}: error 2, out of memory" in done.stderr
    assert "running" not in done.stdout


def test_what_the_compiler_says_of_the_kernel_is_shown(driver: Path, tmp_path: Path) -> None:
    """It is all there is to go by on a card that nobody has tried."""
    done = run(driver, tmp_path / "log", "0", FAKE_CUDA_REFUSES_PTX="1")
    assert done.returncode == 1
    assert "line 7, what is this" in done.stderr


def test_a_card_that_is_not_there_is_refused(driver: Path, tmp_path: Path) -> None:
    """The check starts one load a card."""
    done = run(driver, tmp_path / "log", "5")
    assert done.returncode == 1
    assert "GPU 5: cuDeviceGet: error 101" in done.stderr


def test_no_driver_is_an_error_of_its_own() -> None:
    """The check then says how to give a load."""
    with pytest.raises(OSError, match="libcuda"):
        Cuda("libcuda-that-is-not-there.so.1")


def test_a_launch_is_sized_by_what_the_last_one_took() -> None:
    """Within what 32 bits hold, and one round at least."""
    assert rounds_for(1000, LAUNCH / 2) == 2000
    assert rounds_for(1000, 100 * LAUNCH) == 10
    assert rounds_for(1, 1e3) == 1
    assert rounds_for(MOST_ROUNDS, 1e-9) == MOST_ROUNDS
