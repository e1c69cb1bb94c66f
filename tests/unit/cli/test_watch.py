# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --watch`: on a terminal, in a pipe, and how it ends; narrow screens."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess

import pytest
from click import unstyle

from gpulock.cli.status.status import CLEAR
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


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (40, ["GPU", "STATE", "JOB", "USER"]),
        (60, ["GPU", "STATE", "JOB", "USER", "HELD FOR"]),
        (79, ["GPU", "MODEL", "STATE", "JOB", "USER", "QUEUE", "HELD FOR"]),
    ],
)
def test_on_a_narrow_screen_whole_columns_are_left_out_and_whole_words_wrapped(
    site: Site, columns: int, titles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    site.hold(1, job_id="123456", task_id="17", user="alexandra")
    site.call("quarantine", "2", "--reason", "the fan of this card makes a noise that is not good")
    lines = site.call("status").stdout.splitlines()
    # a path stays whole, to be copied
    assert max(len(line) for line in lines if site.config not in line) <= columns
    text = " ".join(" ".join(lines).split())
    assert "fan of this card makes a noise that is not good" in text
    assert "8 GPUs: 6 free, 1 held, 1 quarantined" in text
    assert re.split(r"  +", lines[0].strip()) == titles
    held = dict(zip(titles, re.split(r"  +", lines[2].strip())))
    assert (held["STATE"], held["JOB"], held["USER"]) == ("held", "123456.17", "alexandra")


def test_a_pipe_gets_plain_frames_and_a_broken_node_is_shown_until_it_is_well(site: Site) -> None:
    away = site.files.driver_root.with_name("away")
    with site.start("status", "--watch", OFTEN, "--free") as process:
        assert process.stdout is not None
        for said in ("8 GPUs: 8 free\n", "broken: no NVIDIA driver", "8 GPUs: 8 free\n"):
            while said not in (line := process.stdout.readline()):
                assert unstyle(line) == line
            if away.exists():
                shutil.move(away, site.files.driver_root)
            elif said.startswith("8"):
                shutil.move(site.files.driver_root, away)
        process.terminate()


def test_it_ends_quietly_when_nobody_reads_any_more(site: Site) -> None:
    with site.start("status", "--watch", OFTEN) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() != "8 GPUs: 8 free\n":
            pass
        process.stdout.close()
        assert process.wait(DEADLINE) == 1
        assert process.stderr.read() == ""
