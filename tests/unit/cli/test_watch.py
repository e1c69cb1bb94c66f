# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --watch`: on a real terminal, in a pipe, and how it ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator

import pytest
from click import unstyle

from gpulock.cli.status.status import CLEAR
from tests.support.cli_site import ROOT, Site
from tests.support.wait import wait_until

OFTEN = "0.2"  # seconds
DEADLINE = 20.0


class Terminal:
    """A command on a terminal of its own; `text` is all that it drew."""

    def __init__(self, argv: list[str], columns: int = 100, lines: int = 40) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.text = ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *argv],  # so that keys and the window's size reach it as signals
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
        )

    def resize(self, columns: int, lines: int) -> None:
        """Give the window another size; the kernel tells the command."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def frames(self) -> list[str]:
        """Return the frames that were drawn whole: another one came after each."""
        return self.text.split(CLEAR)[1:-1]

    def until(self, count: int) -> str:
        """Return the last frame once there are so many."""
        self._read(lambda: len(self.frames()) >= count)
        return self.frames()[-1]

    def ended(self) -> int:
        """Return the exit code once the command is over."""
        self._read(lambda: self.process.poll() is not None)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def _read(self, enough: Callable[[], bool]) -> None:
        def read() -> bool:
            done = enough()
            while select.select([self.master], [], [], 0 if done else 0.02)[0]:
                self.text += os.read(self.master, 65536).decode()
            return done

        wait_until(read, why=lambda: f"another frame\n{self.text}")


@pytest.fixture
def screen(site: Site) -> Iterator[Terminal]:
    made = Terminal(site.command("status", "--watch", OFTEN))
    yield made
    made.close()


def test_it_draws_anew_in_a_window_of_another_size_until_ctrl_c(screen: Terminal) -> None:
    assert "BUS ID" in screen.until(1)
    assert screen.text.startswith(CLEAR)
    screen.resize(80, 5)
    while "more lines: a taller window" not in (last := screen.until(len(screen.frames()) + 1)):
        pass
    assert last.count("\n") == 4
    screen.type(b"\x03")
    assert screen.ended() == 0
    assert "Traceback" not in screen.text and "Aborted" not in screen.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (40, ["GPU", "STATE", "JOB", "USER"]),
        (60, ["GPU", "STATE", "JOB", "USER", "HELD FOR"]),
        (79, ["GPU", "MODEL", "STATE", "JOB", "USER", "QUEUE", "HELD FOR"]),
    ],
)
def test_on_a_narrow_terminal_whole_columns_are_left_out_and_whole_words_wrapped(
    site: Site, columns: int, titles: list[str]
) -> None:
    site.hold(1, job_id="123456", task_id="17", user="alexandra")
    site.call("quarantine", "2", "--reason", "the fan of this card makes a noise that is not good")
    screen = Terminal(site.command("status", "--watch", OFTEN), columns)
    try:
        lines = [line.rstrip() for line in unstyle(screen.until(1)).replace("\r", "").splitlines()]
    finally:
        screen.close()
    # a path stays whole, to be copied
    assert max(len(line) for line in lines if site.config not in line) <= columns
    text = " ".join(" ".join(lines).split())
    assert "fan of this card makes a noise that is not good" in text
    assert "Ctrl-C ends it" in text and "8 GPUs: 6 free, 1 held, 1 quarantined" in text
    head = next(n for n, line in enumerate(lines) if line.startswith("GPU"))
    assert re.split(r"  +", lines[head]) == titles
    held = dict(zip(titles, re.split(r"  +", lines[head + 2].strip())))
    assert (held["STATE"], held["JOB"], held["USER"]) == ("held", "123456.17", "alexandra")


def test_frames_follow_each_other_and_a_broken_node_is_shown_until_it_is_well(site: Site) -> None:
    screen = Terminal(site.command("status", "--watch", OFTEN))
    try:
        assert "8 free" in screen.until(1)
        away = site.files.driver_root.with_name("away")
        shutil.move(site.files.driver_root, away)
        while "broken: no NVIDIA driver" not in screen.until(len(screen.frames()) + 1):
            pass
        shutil.move(away, site.files.driver_root)
        while "8 free" not in screen.until(len(screen.frames()) + 1):
            pass
    finally:
        screen.close()


def test_a_pipe_gets_plain_frames(site: Site) -> None:
    with site.start("status", "--watch", OFTEN, "--free") as process:
        assert process.stdout is not None
        text = "".join([process.stdout.readline() for _ in range(26)])
        assert "\x1b" not in text
        assert text.count("8 GPUs: 8 free\n\n") == 2
        process.terminate()


def test_it_ends_quietly_when_nobody_reads_any_more(site: Site) -> None:
    with site.start("status", "--watch", OFTEN) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() != "8 GPUs: 8 free\n":
            pass
        process.stdout.close()
        assert process.wait(DEADLINE) == 1
        assert process.stderr.read() == ""


@pytest.mark.parametrize("words", [("--watch", "0"), ("--watch", "x"), ("--watch", "--json")])
def test_what_cannot_be_watched_is_a_usage_error(site: Site, words: tuple[str, ...]) -> None:
    assert site.call("status", *words).exit_code == 2
