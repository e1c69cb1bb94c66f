# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --watch`: on a terminal, in a pipe, and how it ends; narrow screens."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gpulock.cli.status.status import CLEAR, watch_status
from tests.support.cli_site import ROOT, Site

OFTEN = "0.2"  # seconds
DEADLINE = 20.0


def test_it_draws_frame_over_frame_on_a_terminal_until_ctrl_c(site: Site) -> None:
    script = shutil.which("script")
    assert script, "script(1) makes the terminal: install util-linux"
    line = f"stty cols 80 rows 5; exec {shlex.join(site.command('status', '--watch', OFTEN))}"
    pipe, text = subprocess.PIPE, b""
    with subprocess.Popen(
        [script, "-qec", line, "/dev/null"], stdin=pipe, stdout=pipe, cwd=ROOT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        while text.count(CLEAR.encode()) < 3:
            text += os.read(process.stdout.fileno(), 65536)
        process.stdin.write(b"\x03")
        process.stdin.flush()
        text += process.stdout.read()
    before, frame, *_ = text.decode().split(CLEAR)
    assert (process.returncode, before, frame.count("\n")) == (0, "", 4)
    assert "Ctrl-C ends it" in frame and "more lines: a taller window" in frame
    assert b"Traceback" not in text and b"Aborted" not in text


def end_in_frame(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Press Ctrl-C while a frame stands."""
    pauses = iter([None] * (number - 1))

    def sleep(_: float) -> None:
        if next(pauses, pauses) is pauses:
            raise KeyboardInterrupt

    monkeypatch.setattr("gpulock.cli.status.status.time.sleep", sleep)


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (5, ["", "a", "  3 more lines: a taller window"]),
        (6, ["", "a", "b", "  2 more lines: a taller window"]),
        (7, ["", "a", "b", "c", "d"]),
        (0, ["", "a", "b", "c", "d"]),  # of a terminal that does not tell
    ],
)
def test_what_does_not_fit_into_the_window_is_counted(
    rows: int, shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_in_frame(monkeypatch, 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, rows)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1)
    watch_status(lambda: (list("abcd"), False), 9.0)
    heading, *lines = capsys.readouterr().out.removeprefix(CLEAR).splitlines()
    assert "every 9 s" in heading and lines == shown


@pytest.mark.parametrize(
    ("place", "words", "said"),
    [
        ("lock_dir", (), "Not a directory"),
        ("driver_root", ("--free",), "gpulock: status: broken: "),
        ("lock_dir", ("--cluster",), "gpulock: status: PROMETHEUS_URL is not set"),
    ],
)
def test_what_fails_now_may_be_well_in_the_next_frame(
    site: Site, place: str, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = getattr(site.files, place)
    shutil.rmtree(folder)
    folder.write_text("x")
    end_in_frame(monkeypatch, 2)
    result = site.call("status", "--watch", "9", *words)
    assert (result.exit_code, result.stdout.count(said), "\x1b" in result.stdout) == (0, 2, False)


@pytest.mark.parametrize("columns", [40, 60, 79])
def test_on_a_narrow_screen_whole_columns_are_left_out_and_whole_words_wrapped(
    site: Site, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    site.hold(1, job_id="123456", task_id="17", user="alexandra")
    site.call("quarantine", "2", "--reason", "the fan of this card makes a noise that is not good")
    lines = site.call("status").stdout.splitlines()
    # a path stays whole, to be copied
    assert max(len(line) for line in lines if site.config not in line) <= columns
    assert lines[0].split()[0] == "GPU" and {"STATE", "JOB", "USER"} <= {*lines[0].split()}
    assert "BUS ID" not in lines[0]
    text = " ".join(" ".join(lines).split())
    assert "123456.17" in text and "8 GPUs: 6 free, 1 held, 1 quarantined" in text
    assert "fan of this card makes a noise that is not good" in text


def test_it_ends_quietly_when_nobody_reads_any_more(site: Site) -> None:
    with site.start("status", "--watch", OFTEN) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() != "8 GPUs: 8 free\n":
            pass
        process.stdout.close()
        assert process.wait(DEADLINE) == 1
        assert process.stderr.read() == ""
