# SPDX-License-Identifier: Apache-2.0
"""Draw something again and again: in place on a terminal, frame after frame anywhere else.

A terminal is left as it was found, however this ends: Ctrl-C, q, a signal, an error, Ctrl-Z. A
frame is one write of lines over lines, so that nothing flickers.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import termios
from collections.abc import Callable
from types import FrameType
from typing import Any

import click

Draw = Callable[[], list[str]]

# control sequences of xterm, which all of today's terminals know (ctlseqs): the alternate screen,
# no cursor, no wrapping at the right edge; then the other way round
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
BEGIN, END = "\x1b[?2026h\x1b[H", "\x1b[?2026l"  # show nothing until the end; then from the top
REST_OF_LINE, REST_OF_SCREEN = "\x1b[K", "\x1b[J"
NEXT = "\r\n"
QUIT = b"qQ\x04"  # and Ctrl-D
FALLBACK = (100, 50)  # columns and lines where a terminal does not tell
GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
MILLI = 1000
LOCAL_MODES = 3  # index of c_lflag in what tcgetattr(3) gives


def watch_frames(draw: Draw, seconds: float) -> None:
    """Draw every `seconds` until somebody ends it; raise BrokenPipeError once nobody reads."""
    try:
        if os.isatty(sys.stdout.fileno()):
            with Screen() as screen:
                screen.show(draw())
                while not screen.wait(seconds):
                    screen.show(draw())
        else:
            while True:
                click.echo("\n".join([*draw(), ""]))
                sys.stdout.flush()
                pause_between_frames(seconds)
    except KeyboardInterrupt:
        return


def pause_between_frames(seconds: float) -> None:
    """Wait, but no longer than somebody reads."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if poll.poll(seconds * MILLI):
        raise closed_output_error()


def closed_output_error() -> OSError:
    """Return what a write would have raised; click ends quietly on it."""
    return BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def format_screen_frame(lines: list[str], columns: int, rows: int) -> str:
    """Return what draws lines over whatever stands on a screen of that size. Pure."""
    if len(lines) > rows:
        left = len(lines) - rows + 1
        lines = [*lines[: rows - 1], click.style(f"  {left} more lines: a taller window", dim=True)]
    parts = [line if len(click.unstyle(line)) >= columns else line + REST_OF_LINE for line in lines]
    below = f"{NEXT}{REST_OF_SCREEN}" if len(lines) < rows else ""
    return f"{BEGIN}{NEXT.join(parts)}{below}{END}"


def ignore_window_signal(_: int, __: FrameType | None) -> None:
    """Take a signal."""


class Screen:
    """The terminal at stdout, as a context; keys that are typed are not shown."""

    def __init__(self) -> None:
        self._out = sys.stdout
        self._plain = click.get_current_context().color is False
        self._keys = sys.stdin.fileno() if os.isatty(sys.stdin.fileno()) else -1
        self._typed: list[Any] | None = None
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Screen:
        self._woken = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        acts: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGWINCH: ignore_window_signal,  # the pipe wakes us: the window has another size
            signal.SIGTSTP: self._stop,
            signal.SIGTERM: self._end,
            signal.SIGHUP: self._end,
        }
        for number, act in acts.items():
            self._before[number] = signal.signal(number, act)
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        for number, act in self._before.items():
            signal.signal(number, act)
        signal.set_wakeup_fd(self._woken)
        os.close(self._read)
        os.close(self._write)
        self._leave()

    def show(self, lines: list[str]) -> None:
        """Draw lines in the place of the last ones."""
        try:
            columns, rows = os.get_terminal_size(self._out.fileno())
        except OSError:
            columns, rows = FALLBACK
        texts = [click.unstyle(line) for line in lines] if self._plain else lines
        self._put(format_screen_frame(texts, columns or FALLBACK[0], rows or FALLBACK[1]))

    def wait(self, seconds: float) -> bool:
        """Wait until it is time to draw; return whether somebody wants to end."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.register(self._out.fileno(), 0)
        if self._keys >= 0:
            poll.register(self._keys, select.POLLIN)
        for fd, event in poll.poll(seconds * MILLI):
            if fd == self._read:
                os.read(self._read, 4096)
            elif event & GONE:
                raise closed_output_error()
            elif any(key in QUIT for key in os.read(fd, 64)):
                return True
        return False

    def _enter(self) -> None:
        if self._keys >= 0:
            self._typed = termios.tcgetattr(self._keys)
            quiet = termios.tcgetattr(self._keys)
            quiet[LOCAL_MODES] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(self._keys, termios.TCSADRAIN, quiet)
        self._put(ENTER)

    def _leave(self) -> None:
        try:
            self._put(LEAVE)
            if self._typed is not None:
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._typed)
        except (OSError, termios.error):
            return  # the terminal itself is gone

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Give the terminal back while we are stopped, and take it again."""
        self._leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._stop)
        self._enter()

    def _end(self, number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)
