# SPDX-License-Identifier: Apache-2.0
"""What a daemon of a scheduler reads from us is short, whatever a user asked for.

qmaster of 8.1.9 ends itself at a longer answer of its verifier (docs/facts/grid-engine.md).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.errors import INVALID_REQUEST, LINE_BYTES, VALUE_BYTES, Refusal, shorten
from gpulock.hooks.frame import log_hook_line
from gpulock.node.settings import parse_settings
from gpulock.sge import sensor
from gpulock.slurm import refuse, task
from gpulock.slurm.call import SlurmHookCall

VALUES = {
    "digits": "0." + "0" * 20_000,
    "characters of four bytes": "\U0001f600" * 5_000,
    "controls": "\n\x1b\x00" * 5_000,
    "no UTF-8": "\udcff" * 20_000,
    "a list": "gpu=1.5," * 5_000,
}
hostile = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def sent(patch: pytest.MonkeyPatch, fd: int, act: Callable[[], object]) -> bytes:
    """Return what is written to a descriptor meanwhile."""
    read, write = os.pipe()
    real = os.write

    def redirected(to: int, data: bytes) -> int:
        return real(write if to == fd else to, data)

    with patch.context() as patched:
        patched.setattr(os, "write", redirected)
        act()
    os.close(write)
    with open(read, "rb") as file:
        return file.read()


def assert_one_short_line(line: bytes) -> None:
    """Fail unless this is one line that each daemon can read at once."""
    assert len(line) <= LINE_BYTES + len("RESULT STATE\n"), len(line)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert b"\0" not in line


@hostile
def test_a_value_is_quoted_by_its_beginning(value: str) -> None:
    short = shorten(value)

    assert len(short.encode("utf-8", "surrogateescape")) <= VALUE_BYTES
    assert short.endswith("...")


@pytest.mark.parametrize("text", ["", "1.5", "x" * 40, "ä" * 20, "\udcff"])
def test_what_is_short_stays_as_it_is(text: str) -> None:
    assert shorten(text) == text


def test_a_character_is_never_cut_in_two() -> None:
    assert [shorten("x" * n + "ä" * 40)[-4:] for n in range(2)] == ["ä...", "ä..."]


def test_a_reason_keeps_what_to_do_behind_a_long_why() -> None:
    sentence = Refusal(INVALID_REQUEST, "5" * 20_000, "ask for whole GPUs").sentence("job 12")

    assert sentence.endswith("...; ask for whole GPUs")
    assert len(sentence) < LINE_BYTES


@hostile
def test_every_refusal_is_one_short_line(value: str) -> None:
    for refusal in (
        Refusal(INVALID_REQUEST, value, "x"),
        Refusal(INVALID_REQUEST, "x", value),
    ):
        assert_one_short_line(refusal.sentence("job 12").encode() + b"\n")
        assert_one_short_line(refusal.sentence(value).encode() + b"\n")


@hostile
def test_what_slurmd_says_of_a_job_is_quoted_by_its_beginning(value: str) -> None:
    environ = {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_UID": "27001",
        "SLURMD_NODENAME": "n1",
        "SLURM_CLUSTER_NAME": "c",
    }
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_JOB_GPUS"):
        with pytest.raises(Refusal) as caught:
            SlurmHookCall({**environ, name: value}).positions()
        assert len(caught.value.why) <= LINE_BYTES // 2


@hostile
def test_slurmctld_is_given_short_words(value: str) -> None:
    assert_one_short_line(refuse.quote_scontrol_text(value).encode() + b"\n")


@hostile
def test_a_task_is_told_in_one_short_line(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_short_line(sent(monkeypatch, 1, lambda: task.print_task_message(value, 1)))


@hostile
def test_a_hooks_standard_error_is_one_short_line(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_settings("SIMULATION=/\n", "x")
    line = Refusal(INVALID_REQUEST, value, "x").sentence("job 12")

    assert_one_short_line(
        sent(monkeypatch, 2, lambda: log_hook_line(settings, line, error=True)),
    )
    assert (
        len(sent(monkeypatch, 2, lambda: log_hook_line(settings, value, error=True)))
        <= LINE_BYTES + 1
    )


@hostile
def test_the_load_sensor_reports_in_short_lines(value: str, tmp_path: Path) -> None:
    config = tmp_path / "gpulock.conf"
    config.write_text(f"SGE_COMPLEXES=gpu {'g' * 20_000}\nSTATE_DIR={tmp_path}\n")
    answers = io.StringIO()
    host = value.replace("\n", "").replace("\0", "")

    sensor.main({"HOST": host}, str(config), io.StringIO("\n"), answers)

    for line in answers.getvalue().split("\n"):
        assert len(line.encode("utf-8", "backslashreplace")) <= LINE_BYTES
