# SPDX-License-Identifier: Apache-2.0
"""Draw something again and again: in place on a terminal, frame after frame anywhere else.

Each frame is one write of lines over lines, so that nothing flickers, and leaves the terminal as
it was: however this ends, there is nothing to restore.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import click

# control sequences of xterm, which all of today's terminals know (ctlseqs). A frame is shown once
# it is whole, from the top on, and no line wraps at the right edge.
CLEAR = "\x1b[H\x1b[2J"
BEGIN, END = "\x1b[?2026h\x1b[?7l\x1b[H", "\x1b[?7h\x1b[?2026l"
REST_OF_LINE, REST_OF_SCREEN = "\x1b[K", "\x1b[J"
FALLBACK = (100, 50)  # columns and lines where a terminal does not tell


def watch_frames(draw: Callable[[], list[str]], seconds: float) -> None:
    """Draw every `seconds` until Ctrl-C; raise BrokenPipeError once nobody reads."""
    terminal = sys.stdout.isatty()
    # a window of another size ends the pause
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    try:
        if terminal:
            click.echo(CLEAR, nl=False, color=True)
        while True:
            lines = draw()
            if terminal:
                if click.get_current_context().color is False:
                    lines = [click.unstyle(line) for line in lines]
                frame = format_screen_frame(lines, *window_size())
                click.echo(frame, nl=False, color=True)
                signal.sigtimedwait({signal.SIGWINCH}, seconds)
            else:
                click.echo("\n".join([*lines, ""]))
                time.sleep(seconds)
    except KeyboardInterrupt:
        return


def window_size() -> tuple[int, int]:
    """Return the columns and lines of the terminal at stdout."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        columns, rows = FALLBACK
    return columns or FALLBACK[0], rows or FALLBACK[1]


def format_screen_frame(lines: list[str], columns: int, rows: int) -> str:
    """Return what draws lines over whatever stands on a screen of that size. Pure.

    The last row stays empty, for the cursor and for what is typed.
    """
    if len(lines) >= rows:
        left = len(lines) - rows + 2
        lines = [
            *lines[: max(0, rows - 2)],
            click.style(f"  {left} more lines: a taller window", dim=True),
        ]
    parts = [line if len(click.unstyle(line)) >= columns else line + REST_OF_LINE for line in lines]
    return "".join([BEGIN, *(f"{part}\n" for part in parts), REST_OF_SCREEN, END])
