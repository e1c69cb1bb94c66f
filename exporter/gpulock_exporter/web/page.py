# SPDX-License-Identifier: Apache-2.0
"""The landing page: the node at a glance, for a person; a pure function to HTML.

One page without script and with nothing from outside. It loads itself again only for those
who ask for that: others would lose the place, and a screen reader starts over (WCAG 2.2, 3.2.5).
Every text in it is escaped. What is not known is left out or a dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby

# nothing is fetched from anywhere, nothing is run, and nobody's page may frame it
PAGE_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
)
SPARK_WIDTH, SPARK_HEIGHT = 240, 40  # of the viewBox
RELOAD = 5  # seconds, of a page that loads itself again
GIB = 1 << 30
# in the order of the summary; page.css has their colours, and the word stands beside each
STATES = (
    *("free", "held", "held_idle", "foreign"),
    *("unknown", "stale", "quarantined", "missing"),
)


@dataclass(frozen=True)
class Tile:
    """One device; `history` holds the utilisation of the last minutes, None where not observed.

    `card` names the card of a MIG instance: its neighbours stand together. `note` is what a person
    should know of the state, `warnings` what speaks against the device in any state. `mean` is the
    utilisation since the lock, of the time that was observed.
    """

    name: str
    model: str
    state: str
    place: str = ""
    job: str = ""
    user: str = ""
    held: str = ""
    note: str = ""
    warnings: Sequence[str] = ()
    card: str = ""
    utilization: float | None = None
    history: Sequence[float | None] = ()
    mean: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    power: float | None = None


@dataclass(frozen=True)
class Page:
    """A node; `old` is how many seconds old the samples are, None where there are none.

    `fault` says why there are none, or why they are old, in the driver's words; `unread` why the
    locks cannot be read, `live` whether the page loads itself again. `steps` are of GPUs that went
    out of service, were reset or came back, the latest first, `waiting` of users in the queue,
    `reserves` what they have reserved.
    """

    node: str
    version: str
    tiles: Sequence[Tile] = field(default=())
    old: float | None = 0.0
    limit: float = 5.0
    fault: str = ""
    unread: str = ""
    span: str = "5 minutes"
    driver: str = ""
    live: bool = False
    steps: Sequence[str] = ()
    waiting: Sequence[str] = ()
    reserves: Sequence[str] = ()


def render_page(page: Page) -> str:
    """Return the page as HTML."""
    counts = {state: sum(tile.state == state for tile in page.tiles) for state in STATES}
    sick = sum(bool(tile.warnings) for tile in page.tiles)
    there = [f"{count} {page_state_label(state)}" for state, count in counts.items() if count]
    title = f"{page.node}: {', '.join(there) or 'no GPU'}"
    together = groupby(page.tiles, key=lambda tile: tile.card)  # instances stand below their card
    return "".join(
        [
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
            '<meta name=viewport content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{page_style()}</style></head><body>",
            f"<header><h1>{escape(page.node)}</h1>{render_page_summary(counts, sick)}</header>",
            render_page_warning(page),
            "<main>",
            *[render_tile_group(card, list(some), page.span) for card, some in together],
            "" if page.tiles else "<p class=none>No GPU is known here.</p>",
            render_page_lines("Queue", page.waiting),
            render_page_lines("Reserved", page.reserves),
            render_page_lines("Health", page.steps),
            f"</main><footer>{render_page_footer(page)}</footer></body></html>\n",
        ]
    )


def render_page_summary(counts: Mapping[str, int], sick: int) -> str:
    """Return how many are free of how many, how many are in each state, and how many are sick."""
    whole = sum(counts.values())
    if not whole:
        return ""
    chips = [
        f'<li class="{state}"><b>{count}</b> {page_state_label(state)}</li>'
        for state, count in counts.items()
        if count and state != "free"
    ]
    if sick:
        chips.append(f"<li class=warn><b>{sick}</b> with a fault</li>")
    free = f"<p><b>{counts['free']}</b> of {whole} free</p>"
    return f"{free}<ul>{''.join(chips)}</ul>"


def render_tile_group(card: str, tiles: Sequence[Tile], span: str) -> str:
    """Return tiles that stand together, below the name of their card where they are its parts."""
    inner = "".join(render_tile(tile, span) for tile in tiles)
    if not card:
        return f"<div>{inner}</div>"
    free = sum(tile.state == "free" for tile in tiles)
    count = f"{len(tiles)} MIG instance{'s' if len(tiles) > 1 else ''}, {free} free"
    return f"<h2>{escape(card)} <span>{count}</span></h2><div class=mig>{inner}</div>"


def render_page_lines(title: str, lines: Sequence[str]) -> str:
    """Return a part of the page that has lines of text, nothing without one."""
    text = "".join(f"<p class=small>{escape(line)}</p>" for line in lines)
    return f"<h2>{title}</h2>{text}" if text else ""


def render_page_footer(page: Page) -> str:
    """Return what the small print says."""
    said = [
        f"gpulock-exporter {escape(page.version)}",
        f"driver {escape(page.driver)}" if page.driver else "",
        f"sampled {format_sample_age(page.old)} ago" if page.old is not None else "",
        f"lines: the last {escape(page.span)}" if any(tile.history for tile in page.tiles) else "",
        "<a href=/>stand still</a>" if page.live else "<a href=/>reload</a>",
        "" if page.live else f'<a href="/?live">reload every {RELOAD} s</a>',
        "<a href=/metrics>metrics</a>",
        "<a href=/-/healthy>health</a>",
    ]
    return " · ".join(part for part in said if part)


def render_page_warning(page: Page) -> str:
    """Return what must be said before all else: what is old, not there, or not known."""
    why = f": {escape(page.fault)}" if page.fault else ""
    locks = "" if page.unread else " Locks are shown as they are now, use is not."
    said: list[str] = []
    if page.unread:
        said.append(f"Who holds what is not known: {escape(page.unread)}")
    if page.old is None:
        said.append(f"No samples{why or ' yet'}.{locks}")
    elif page.old > page.limit:
        said.append(f"Samples are {format_sample_age(page.old)} old{why}.{locks}")
    return "".join(f"<p role=alert class=old>{words}</p>" for words in said)


def format_sample_age(seconds: float) -> str:
    """Return seconds as people say them."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"  # noqa: PLR2004


def render_tile(tile: Tile, span: str) -> str:
    """Return one device: what is not known is left out, or a dash."""
    state = escape(page_state_label(tile.state))
    about = f"{escape(tile.model)}" if tile.model else ""
    parts = [
        f'<article class="{escape(tile.state)}{" sick" if tile.warnings else ""}">',
        f"<header><b>{escape(tile.name)}</b><span title='{about}'>{about}</span>",
        f"<em>{state}</em></header>",
        *[f"<p class=warn>{escape(words)}</p>" for words in tile.warnings],
        render_tile_holder(tile),
        ""
        if tile.state == "missing"
        else render_tile_utilization(tile, span) + render_tile_memory(tile),
        "" if tile.mean is None else f"<p class=small>mean {tile.mean:.0%} since the lock</p>",
        f"<p class=note>{escape(tile.note)}</p>" if tile.note else "",
        f"<p class=place>{escape(tile.place)}</p></article>",
    ]
    return "".join(parts)


def page_state_label(state: str) -> str:
    """Return a state as people read it."""
    return state.replace("_", "-")


def render_tile_holder(tile: Tile) -> str:
    """Return who holds it: a long name gives way, the time stays."""
    if not (tile.job or tile.user or tile.held):
        return "<p class=holder></p>"
    who = " · ".join(escape(word) for word in (tile.job, tile.user) if word)
    return f"<p class=holder><span title='{who}'>{who}</span><time>{escape(tile.held)}</time></p>"


def render_tile_utilization(tile: Tile, span: str) -> str:
    """Return the utilisation, now and as a line."""
    line = render_tile_sparkline(tile.history, span)
    if tile.utilization is None:
        return f"<p class=use>{line or '<span>use not observed</span>'}</p>"
    return f"<p class=use><b>{tile.utilization:.0%}</b>{line}</p>"


def render_tile_memory(tile: Tile) -> str:
    """Return the memory bar, with temperature and power."""
    heat = [
        "" if tile.temperature is None else f"{tile.temperature:.0f} °C",
        "" if tile.power is None else f"{tile.power:.0f} W",
    ]
    text, share = "memory &ndash;", None
    if tile.memory_used is not None and tile.memory_total:
        share = min(1.0, tile.memory_used / tile.memory_total)
        text = f"{tile.memory_used / GIB:.1f} of {tile.memory_total / GIB:.0f} GiB"
    elif not any(heat):
        return ""
    bar = "" if share is None else f"<i class=bar><i style=width:{share * 100:.1f}%></i></i>"
    board = " · ".join(part for part in heat if part)
    return f"{bar}<p class=small><span>{text}</span><span>{board}</span></p>"


def render_tile_sparkline(history: Sequence[float | None], span: str) -> str:
    """Return the utilisation as a line over a shade; where nothing was observed both break."""
    if not any(value is not None for value in history):
        return ""
    step = SPARK_WIDTH / max(1, len(history) - 1)
    line: list[str] = []
    shade: list[str] = []
    for begin, run in observed_runs(history):
        heights = [1 + (SPARK_HEIGHT - 2) * (1 - min(1.0, max(0.0, value))) for value in run]
        points = [f"{(begin + n) * step:.1f} {height:.1f}" for n, height in enumerate(heights)]
        line.append(f"M{'L'.join(points)}" + ("h0" if len(run) == 1 else ""))
        first, last = begin * step, (begin + len(run) - 1) * step
        shade.append(f"M{first:.1f} {SPARK_HEIGHT}L{'L'.join(points)}L{last:.1f} {SPARK_HEIGHT}z")
    label = escape(f"utilisation of the last {span}")
    return (
        f'<svg viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" preserveAspectRatio=none role=img '
        f'aria-label="{label}"><path class=shade d="{"".join(shade)}"/>'
        f'<path d="{"".join(line)}"/></svg>'
    )


def observed_runs(history: Sequence[float | None]) -> Iterator[tuple[int, list[float]]]:
    """Yield each stretch that was observed, with the place where it begins."""
    place = 0
    for known, some in groupby(history, key=lambda value: value is not None):
        values = list(some)
        if known:
            yield place, [value for value in values if value is not None]
        place += len(values)


@cache
def page_style() -> str:
    """Return the style sheet: dark and light by the reader's setting, one column on a phone."""
    return files("gpulock_exporter.web").joinpath("page.css").read_text()
