# SPDX-License-Identifier: Apache-2.0
"""The landing page: the node at a glance, for a person; a pure function of a snapshot to HTML.

One page without script and with nothing from outside. It loads itself again only for those
who ask for that: others would lose the place, and a screen reader starts over (WCAG 2.2, 3.2.5).
Every text in it is escaped. What is not known is left out or a dash, never a zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import NamedTuple

from gpulock.alloc import states
from gpulock.daemon.health.findings import HARDWARE, describe_recovery_action
from gpulock.store.owner import Owner
from gpulock.store.reservations import Reservation
from gpulock.text.words import format_duration, held_seconds
from gpulock.workstation.waiting import WaitingCaller
from gpulock_exporter.metrics.families import LabelUser
from gpulock_exporter.state.snapshot import DeviceSnapshot, Moment, NodeSnapshot
from gpulock_exporter.web.utilisation_history import SPAN, UtilizationHistory, render_sparkline

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
RELOAD = 5  # seconds, of a page that loads itself again
MOST_CALLERS = 20  # of the queue
GIB = 1 << 30
HOT = 88.0  # degrees: above what cards run at in good air, as the alert GpulockGpuHot has it
STATES = states.STATES[::-1]  # page.css has their colours, and the word stands beside each


class PageOptions(NamedTuple):
    """What a page needs besides a snapshot.

    `limit` is the age in seconds from which samples are old, `fault` says why they are, in the
    driver's words, `live` whether the page loads itself again.
    """

    node: str
    label_user: LabelUser = LabelUser.NAME
    boot_id: str = ""
    limit: float = 5.0
    fault: str = ""
    live: bool = False


def render_page(snapshot: NodeSnapshot, history: UtilizationHistory, about: PageOptions) -> str:
    """Return the page as HTML."""
    now = snapshot.at
    unread = snapshot.health.collectors.get("locks", "")
    shown = [
        seen
        for seen in snapshot.devices
        # of a card in MIG mode only the instances are granted
        if seen.state is not None or (unread and not (seen.mig and not seen.instance))
    ]
    own = {seen.id: list(device_warnings(seen, now)) for seen in snapshot.devices}
    of_card = {seen.id: own.get(seen.bus, []) for seen in shown if seen.instance}
    warnings = {seen.id: of_card.get(seen.id, []) + own[seen.id] for seen in shown}
    counts = Counter(seen.state or "unknown" for seen in shown)
    there = [f"{counts[state]} {state_words(state)}" for state in STATES if counts[state]]
    parts: list[str] = []
    for card, some in groupby(shown, key=lambda seen: seen.card if seen.instance else None):
        together = list(some)  # instances stand below their card
        tiles = "".join(
            render_tile(seen, history.of(seen.id), warnings[seen.id], now, about)
            for seen in together
        )
        parts.append(render_card(card, together, tiles))
    waiting = [describe_caller(one, now, about) for one in snapshot.waiting[:MOST_CALLERS]]
    reserved = [
        describe_reservation(one, snapshot, about) for one in snapshot.reservations[:MOST_CALLERS]
    ]
    title = f"{about.node}: {', '.join(there) or 'no GPU'}"
    sick = sum(map(bool, warnings.values()))
    return "".join(
        [
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
            '<meta name=viewport content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{page_style()}</style></head><body>",
            f"<header><h1>{escape(about.node)}</h1>{render_summary(counts, sick)}</header>",
            render_alerts(snapshot, about, unread),
            "<main>",
            *parts,
            "" if shown else "<p class=none>No GPU is known here.</p>",
            render_lines("Queue", waiting),
            render_lines("Reserved", reserved),
            f"</main><footer>{render_footer(snapshot, about)}</footer></body></html>\n",
        ]
    )


def state_words(state: str) -> str:
    """Return a state as people read it."""
    return state.replace("_", "-")


def render_summary(counts: Counter[str], sick: int) -> str:
    """Return how many are free of how many, how many are in each state, and how many are sick."""
    if not counts:
        return ""
    chips = [
        f'<li class="{state}"><b>{counts[state]}</b> {state_words(state)}</li>'
        for state in STATES
        if counts[state] and state != "free"
    ]
    if sick:
        chips.append(f"<li class=warn><b>{sick}</b> with a fault</li>")
    free = f"<p><b>{counts['free']}</b> of {sum(counts.values())} free</p>"
    return f"{free}<ul>{''.join(chips)}</ul>"


def render_alerts(snapshot: NodeSnapshot, about: PageOptions, unread: str) -> str:
    """Return what must be said before all else: what is old, not there, or not known."""
    age = sample_age(snapshot)
    why = f": {escape(about.fault)}" if about.fault else ""
    locks = "" if unread else " Locks are shown as they are now, use is not."
    said: list[str] = []
    if unread:
        said.append(f"Who holds what is not known: {escape(unread)}")
    if age is None:
        said.append(f"No samples{why or ' yet'}.{locks}")
    elif age > about.limit:
        said.append(f"Samples are {format_duration(age)} old{why}.{locks}")
    return "".join(f"<p role=alert class=old>{words}</p>" for words in said)


def sample_age(snapshot: NodeSnapshot) -> float | None:
    """Return how many seconds old the samples are, None where there are none."""
    sampled = snapshot.health.sampled
    return None if sampled is None else max(0.0, snapshot.at.wall - sampled)


def render_lines(title: str, lines: Sequence[str]) -> str:
    """Return a part of the page that has lines of text, nothing without one."""
    text = "".join(f"<p class=small>{escape(line)}</p>" for line in lines)
    return f"<h2>{title}</h2>{text}" if text else ""


def render_footer(snapshot: NodeSnapshot, about: PageOptions) -> str:
    """Return what the small print says."""
    age = sample_age(snapshot)
    said = [
        f"gpulock-exporter {escape(snapshot.health.version)}",
        f"driver {escape(snapshot.driver)}" if snapshot.driver else "",
        f"sampled {format_duration(age)} ago; lines: the last {SPAN}" if age is not None else "",
        "<a href=/>stand still</a>" if about.live else "<a href=/>reload</a>",
        "" if about.live else f'<a href="/?live">reload every {RELOAD} s</a>',
        "<a href=/metrics>metrics</a>",
        "<a href=/-/healthy>health</a>",
    ]
    return " · ".join(filter(None, said))


def describe_caller(caller: WaitingCaller, now: Moment, about: PageOptions) -> str:
    """Return who waits, since when, for what and why; a person is named as in the metrics."""
    user = about.label_user.of(Owner(user=caller.user, uid=caller.uid))
    waited = format_duration(now.boottime - caller.since)
    return f"{user or f'number {caller.number}'} waits {waited} for {caller.what}: {caller.why}"


def describe_reservation(one: Reservation, snapshot: NodeSnapshot, about: PageOptions) -> str:
    """Return for whom a GPU is reserved, from when to when; a person is named as in the metrics."""
    who = about.label_user.of(Owner(user=one.user, uid=one.uid)) or "a user"
    names = {seen.id: seen.gpu_label or seen.id for seen in snapshot.devices}
    return f"GPU {names.get(one.device, one.device)}: {one.describe(who)}"


# --- a device -----------------------------------------------------------------------------------


def render_card(card: int | None, together: Sequence[DeviceSnapshot], tiles: str) -> str:
    """Return tiles that stand together, below the name of their card where they are its parts."""
    if card is None:
        return f"<div>{tiles}</div>"
    free = sum(seen.state == "free" for seen in together)
    count = f"{len(together)} MIG instance{'s' if len(together) > 1 else ''}, {free} free"
    name = escape(f"GPU {card} {together[0].name}")
    return f"<h2>{name} <span>{count}</span></h2><div class=mig>{tiles}</div>"


def render_tile(
    seen: DeviceSnapshot,
    line: Sequence[float | None],
    warnings: Sequence[str],
    now: Moment,
    about: PageOptions,
) -> str:
    """Return one device: what is not known is left out, or a dash."""
    state, model = seen.state or "unknown", escape(seen.profile or seen.name)
    name, note = seen.instance or seen.gpu_label or seen.id, device_note(seen, now)
    use = "" if state == "missing" else render_utilization(seen, line) + render_memory(seen)
    mean = "" if seen.sharers or seen.mean is None else f"mean {seen.mean:.0%} since the lock"
    parts = [
        f'<article class="{escape(state)}{" sick" if warnings else ""}">',
        f"<header><b>{escape(name)}</b><span title='{model}'>{model}</span>",
        f"<em>{escape(state_words(state))}</em></header>",
        *[f"<p class=warn>{escape(words)}</p>" for words in warnings],
        render_holder(seen, now, about),
        use,
        f"<p class=small>{mean}</p>" if mean else "",
        f"<p class=note>{escape(note)}</p>" if note else "",
        f"<p class=place>{escape(seen.id)}</p></article>",
    ]
    return "".join(parts)


def render_holder(seen: DeviceSnapshot, now: Moment, about: PageOptions) -> str:
    """Return who holds it: a long name gives way, the time stays."""
    job, held, holders = "", "", list(seen.sharers.values())
    if seen.owner is not None:
        job, holders = job_name(seen.owner), [seen.owner]
        held = format_duration(held_seconds(seen.owner, about.boot_id, now.boottime, now.wall))
    elif holders:
        job = f"shared by {', '.join(dict.fromkeys(map(job_name, holders)))}"
    if not holders:
        return "<p class=holder></p>"
    users = filter(None, dict.fromkeys(about.label_user.of(one) for one in holders))
    who = escape(" · ".join(filter(None, (job, ", ".join(users)))))
    return f"<p class=holder><span title='{who}'>{who}</span><time>{escape(held)}</time></p>"


def job_name(record: Owner) -> str:
    """Return how the page names who holds a device."""
    return record.job() if record.scheduler in ("process", "admin") else f"job {record.job()}"


def device_note(seen: DeviceSnapshot, now: Moment) -> str:
    """Return what a person should know of a device's state: why, since when, how many."""
    if seen.state == states.HELD_IDLE and seen.idle_since is not None:
        return f"observed to do nothing for {format_duration(now.wall - seen.idle_since)}"
    if seen.state in (states.FOREIGN, states.HELD, states.HELD_IDLE) and seen.foreign:
        number = f"{seen.foreign} foreign process{'es' if seen.foreign > 1 else ''}"
        return f"{number} beside the owner's" if seen.owner else number
    if seen.owner and seen.owner.scheduler == "admin" and not seen.reason:
        return seen.owner.comment
    return seen.reason


def device_warnings(seen: DeviceSnapshot, now: Moment) -> Iterator[str]:
    """Yield what speaks against a device, whatever its state: what it had in this boot, or has.

    The driver's word and a failed check of gpulockd's may be the same.
    """
    for xid, (_, at) in sorted(seen.xids.items()):
        if xid in HARDWARE:
            yield f"XID {xid} ({HARDWARE[xid]}), {format_duration(now.wall - at)} ago"
    faults = [why for _, why in sorted(seen.checks.items())]
    if seen.recovery_action:
        faults.append(describe_recovery_action(seen.recovery_action))
    if seen.remap_failure:
        faults.append("a row of its memory could not be remapped")
    yield from dict.fromkeys(filter(None, faults))
    if seen.temperature is not None and seen.temperature > HOT:
        yield f"{seen.temperature:.0f} °C is hot"


def render_utilization(seen: DeviceSnapshot, history: Sequence[float | None]) -> str:
    """Return the utilisation, now and as a line."""
    line = render_sparkline(history)
    if seen.utilization is None:
        return f"<p class=use>{line or '<span>use not observed</span>'}</p>"
    return f"<p class=use><b>{seen.utilization:.0%}</b>{line}</p>"


def render_memory(seen: DeviceSnapshot) -> str:
    """Return the memory bar, with temperature and power."""
    heat = [
        "" if seen.temperature is None else f"{seen.temperature:.0f} °C",
        "" if seen.power is None else f"{seen.power:.0f} W",
    ]
    text, bar = "memory &ndash;", ""
    if seen.memory_used is not None and seen.memory_total:
        share = seen.memory_used / seen.memory_total
        text = f"{seen.memory_used / GIB:.1f} of {seen.memory_total / GIB:.0f} GiB"
        bar = f"<i class=bar><i style=width:{share * 100:.1f}%></i></i>"
    elif not any(heat):
        return ""
    board = " · ".join(filter(None, heat))
    return f"{bar}<p class=small><span>{text}</span><span>{board}</span></p>"


@cache
def page_style() -> str:
    """Return the style sheet: dark and light by the reader's setting, one column on a phone."""
    return files("gpulock_exporter.web").joinpath("page.css").read_text()
