# SPDX-License-Identifier: Apache-2.0
"""Fake clients of Grid Engine and Slurm played by the test itself: each process takes 20 ms."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from gpulock.install import hooks
from gpulock.install.files import run_program

HERE = Path(__file__).parent
CODE: dict[str, CodeType] = {
    text: compile(text, name, "exec")
    for name in ("fake_qconf.py", "fake_slurm.py")
    for text in [(HERE / name).read_text()]
}


def play_fakes_in_process(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let these modules of the installer start no process for a fake client; others are started."""
    for module in modules:
        monkeypatch.setattr(module, "run_program", run_or_play)


def run_or_play(
    command: Sequence[str | Path], seconds: float, env: Mapping[str, str], do: str = "", **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program as the installer does, or play it where it is one of the fakes."""
    program = Path(more.get("executable") or command[0])
    code = CODE.get(program.read_text(errors="replace")) if program.is_file() else None
    if code is None:
        return run_program(command, seconds, env, do, **more)
    return play(code, program, [str(word) for word in command], env)


def play(
    code: CodeType, program: Path, words: list[str], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, with this command line and environment; return what came of it."""
    out, errors, status = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", words),
        patch.object(os, "environ", dict(env)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            exec(code, {"__name__": "__main__", "__file__": str(program)})
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            errors.write(end.code if isinstance(end.code, str) else "")
    return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())


def compile_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave hooks without byte code, which takes seconds."""

    def nothing(interpreter: str, library: Path) -> None:
        del interpreter, library

    monkeypatch.setattr(hooks, "_compile_library", nothing)
