# SPDX-License-Identifier: Apache-2.0
"""The landing page: the node at a glance, for a person; a pure function to HTML.

One page without script and with nothing from outside: it loads itself again every few seconds.
Every text in it is escaped. What is not known is left out or a dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

RELOAD = 5  # seconds
SPARK_WIDTH, SPARK_HEIGHT = 240, 40  # of the viewBox
GIB = 1 << 30
# in the order of the summary; page.css has their colours, and the word stands beside each
STATES = (
    *("free", "held", "held_idle", "foreign"),
    *("unknown", "stale", "quarantined", "missing"),
)


@dataclass(frozen=True)
class Tile:
    """One device; `history` holds the utilisation of the last minutes, None where not observed."""

    name: str
    model: str
    state: str
    place: str = ""
    job: str = ""
    user: str = ""
    held: str = ""
    reason: str = ""
    utilization: float | None = None
    history: Sequence[float | None] = ()
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Page:
    """A node; `old` is how many seconds old the samples are, None where there are none.

    `fault` says why there are none, or why they are old, in the driver's words.
    """

    node: str
    version: str
    tiles: Sequence[Tile] = field(default=())
    old: float | None = 0.0
    limit: float = 5.0
    fault: str = ""
    span: str = "5 minutes"


def render(page: Page) -> str:
    """Return the page as HTML."""
    counts = " · ".join(
        f"{sum(tile.state == state for tile in page.tiles)} {words(state)}"
        for state in STATES
        if any(tile.state == state for tile in page.tiles)
    )
    title = f"{page.node}: {counts or 'no GPU'}"
    return "".join(
        [
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
            '<meta name=viewport content="width=device-width,initial-scale=1">',
            f'<meta http-equiv=refresh content="{RELOAD}">',
            f"<title>{escape(title)}</title><style>{style()}</style></head><body>",
            f"<header><h1>{escape(page.node)}</h1><p>{escape(counts or 'no GPU')}</p></header>",
            warning(page),
            "<main>",
            *[tile_html(tile, page.span) for tile in page.tiles],
            "</main><footer>",
            f"gpulock-exporter {escape(page.version)} · <a href=/metrics>metrics</a> · "
            "<a href=/-/healthy>health</a></footer></body></html>\n",
        ]
    )


def warning(page: Page) -> str:
    """Return what must be said before all else: that the numbers are old, or not there."""
    why = f": {escape(page.fault)}" if page.fault else ""
    if page.old is None:
        return f"<p role=alert class=old>No samples{why}. Locks are shown, use is not.</p>"
    if page.old > page.limit:
        seconds = f"{page.old:.0f} s" if page.old < 120 else f"{page.old / 60:.0f} min"  # noqa: PLR2004
        return f"<p role=alert class=old>Samples are {seconds} old{why}.</p>"
    return ""


def tile_html(tile: Tile, span: str) -> str:
    """Return one device."""
    use = "&ndash;" if tile.utilization is None else f"{tile.utilization:.0%}"
    holder = " · ".join(escape(word) for word in (tile.job, tile.user, tile.held) if word)
    lines = [
        f'<article class="{escape(tile.state)}">',
        f"<h2><b>{escape(tile.name)}</b> {escape(tile.model)}</h2>",
        f"<p class=state>{escape(words(tile.state))}</p>",
        f"<p class=holder>{holder or '&nbsp;'}</p>",
        f"<p class=use><b>{use}</b> {spark(tile.history, span)}</p>",
        memory(tile),
        f"<p class=small>{escape(tile.reason or tile.place)}</p></article>",
    ]
    return "".join(lines)


def words(state: str) -> str:
    """Return a state as people read it."""
    return state.replace("_", "-")


def memory(tile: Tile) -> str:
    """Return the memory bar with the temperature."""
    heat = "" if tile.temperature is None else f"<span>{tile.temperature:.0f} °C</span>"
    if tile.memory_used is None or not tile.memory_total:
        return f"<p class=small><span>memory &ndash;</span>{heat}</p>"
    share = min(1.0, tile.memory_used / tile.memory_total)
    text = f"{tile.memory_used / GIB:.1f} of {tile.memory_total / GIB:.0f} GiB"
    bar = f"<i class=bar><i style=width:{share * 100:.1f}%></i></i>"
    return f"{bar}<p class=small><span>{text}</span>{heat}</p>"


def spark(history: Sequence[float | None], span: str) -> str:
    """Return the utilisation as a line; where nothing was observed the line is broken."""
    if not any(value is not None for value in history):
        return ""
    step = SPARK_WIDTH / max(1, len(history) - 1)
    parts: list[str] = []
    pen = "M"
    for number, value in enumerate(history):
        if value is None:
            pen = "M"
            continue
        y = 1 + (SPARK_HEIGHT - 2) * (1 - min(1.0, max(0.0, value)))
        parts.append(f"{pen}{number * step:.1f} {y:.1f}")
        pen = "L"
    label = escape(f"utilisation of the last {span}")
    return (
        f'<svg viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" preserveAspectRatio=none role=img '
        f'aria-label="{label}"><path d="{"".join(parts)}"/></svg>'
    )


def style() -> str:
    """Return the style sheet: dark and light by the reader's setting, one column on a phone."""
    return files("gpulock_exporter").joinpath("page.css").read_text()
