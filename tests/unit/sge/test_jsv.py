# SPDX-License-Identifier: Apache-2.0
"""The verifier turns away what no hook could grant, and lets everything else through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpulock.sge.jsv import jsv_reject_reason

ROOT = Path(__file__).parents[3]
NAMES = ("gpu", "gpuj")


@pytest.mark.parametrize("hard", ["", "gpu=0", "gpu=2,h_rt=100", "gpuj=16", "h_vmem=8M", "x=1.5"])
def test_sensible_requests_pass(hard: str) -> None:
    assert jsv_reject_reason({"l_hard": hard}, NAMES, of_kind={}) == ""


@pytest.mark.parametrize("value", ["1.5", "1K", "-1", "TRUE", "", "0x2", "\u0663"])
def test_what_is_no_whole_number_is_turned_away(value: str) -> None:
    assert "a whole number" in jsv_reject_reason(
        {"l_hard": f"h_rt=1,gpu={value}"}, NAMES, of_kind={}
    )


def test_soft_requests_are_turned_away() -> None:
    assert "-soft -l gpu" in jsv_reject_reason({"l_soft": "gpu=1"}, NAMES, of_kind={})


def answers(data: bytes, *args: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-IS", ROOT / "prolog/sge-jsv", *args],
        input=data,
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().splitlines()


def test_one_process_serves_many_jobs_and_forgets_each() -> None:
    command = [sys.executable, "-IS", str(ROOT / "prolog/sge-jsv"), "gpu"]
    said: list[bytes] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as jsv:
        assert jsv.stdin is not None and jsv.stdout is not None
        for job in (b"START\nPARAM l_hard gpu=1.5\nBEGIN\n", b"START\nPARAM l_hard gpu=1\nBEGIN\n"):
            jsv.stdin.write(job)
            jsv.stdin.flush()
            said += [jsv.stdout.readline(), jsv.stdout.readline()]
        jsv.stdin.write(b"QUIT\n")
    assert said == [
        b"STARTED\n",
        b"RESULT STATE REJECT gpulock: -l gpu=1.5: ask for a whole number of GPUs\n",
        b"STARTED\n",
        b"RESULT STATE ACCEPT\n",
    ]


@pytest.mark.parametrize(
    "forgery",
    [b"PARAM CMDARG0 x\nprolog=root@/tmp/x\n", b"BEGIN\nPARAM CMDARG1 y\n", b"BEGIN\n"],
)
def test_a_newline_in_a_job_s_own_text_is_turned_away(forgery: bytes) -> None:
    said = answers(b"START\nPARAM l_hard gpu=1\n" + forgery + b"BEGIN\n", "gpu")
    assert len(said) == 2 and "newline" in said[1]


def test_odd_input_is_survived() -> None:
    said = answers(
        b"\n\xff\xfe\nPARAM\nPARAM x\nENV ADD\nWHAT\nSTART\nPARAM l_hard gpu=\xff\nBEGIN\n"
    )

    assert said == [
        "STARTED",
        "RESULT STATE REJECT gpulock: -l gpu=?: ask for a whole number of GPUs",
    ]


def test_several_kinds_may_be_asked_for_each_by_one_complex() -> None:
    of_kind = {"gpu": "", "gpu_a": "model:a100", "gpu_b": "model:a100"}

    def why(hard: str) -> str:
        return jsv_reject_reason({"l_hard": hard}, tuple(of_kind), of_kind=of_kind)

    assert why("gpu=1,gpu_a=2") == ""
    assert "twice (gpu_a, gpu_b)" in why("gpu_a=1,gpu_b=2")
    assert "a whole number" in why("gpu=1,gpu_a=0.5")
