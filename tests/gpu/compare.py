# SPDX-License-Identifier: Apache-2.0
"""Judge rounds of scrape, nvidia-smi, scrape: what agreed, differed, or neither has. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from tests.gpu.rules import (
    COUNTERS,
    INFO,
    OFTEN_ONE_SIDED,
    PROCESSES,
    RULES,
    Grown,
    Rule,
)
from tests.gpu.scraped import Card
from tests.gpu.smi import Answer, is_absent, number

FLAGS = {"mig_mode", "persistence_mode"}
SHORT_DOMAIN = 4  # digits that the kernel writes of a PCI domain
QUIET = "idle"  # the phase without a load
LATE = 1.2  # seconds by which a counter lags behind: it moves once a look


class Round(NamedTuple):
    """What was said at one moment: our scrapes before and after nvidia-smi.

    `at` is when the latter's sample was taken, in seconds of the epoch. `phase` says under which
    load; `settled` that it is not just changing.
    """

    at: float
    phase: str
    settled: bool
    before: Mapping[str, Card]
    told: Answer
    after: Mapping[str, Card]


class Finding(Enum):
    """How a comparison ended."""

    AGREED = "agreed"
    NEITHER = "neither has it"
    DIFFERED = "DIFFERED"
    UNASKED = "not asked"


class Line(NamedTuple):
    """One comparison of one card; `words` have the numbers."""

    uuid: str
    metric: str
    finding: Finding
    words: str
    why: str = ""


def judge(rounds: Sequence[Round], known: Iterable[str]) -> list[Line]:
    """Return every comparison; `known` are the fields that nvidia-smi was asked for."""
    fields = frozenset(known)
    uuids = sorted({uuid for one in rounds for uuid in (*one.told.fields, *one.after)})
    found: list[Line] = []
    for uuid in uuids:
        here = [one for one in rounds if uuid in one.before and uuid in one.after]
        here = [one for one in here if uuid in one.told.fields]
        if not here:
            words = "it is not in all of /metrics and nvidia-smi"
            found.append(Line(uuid, "gpu_info", Finding.DIFFERED, words))
            continue
        found += identity(uuid, here[-1], fields)
        found += [gauge(uuid, here, rule, fields) for rule in RULES]
        found += [grown(uuid, here, rule, fields) for rule in COUNTERS]
        found.append(processes(uuid, here))
    return found


def identity(uuid: str, one: Round, fields: frozenset[str]) -> list[Line]:
    """Compare what a card is."""
    info, row = one.after[uuid].info, one.told.fields[uuid]
    lines: list[Line] = []
    for label, field in INFO.items():
        metric = f"info {label}"
        if field not in fields:
            lines.append(Line(uuid, metric, Finding.UNASKED, f"there is no {field}"))
            continue
        ours, theirs = info.get(label, ""), "" if is_absent(row[field]) else row[field]
        if label in FLAGS and theirs:
            theirs = {"Enabled": "1", "Disabled": "0"}.get(theirs, theirs)
        if label == "pci_bus_id":
            theirs = kernel_bus(theirs)
        finding = Finding.AGREED if ours == theirs else Finding.DIFFERED
        if not ours and not theirs:
            finding = Finding.NEITHER
        lines.append(Line(uuid, metric, finding, f"{ours!r}, nvidia-smi {theirs!r}"))
    return lines


def kernel_bus(text: str) -> str:
    """Return a bus id as the kernel writes it: nvidia-smi's domain has eight digits."""
    domain, _, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):0{SHORT_DOMAIN}x}:{rest}"
    except ValueError:
        return text


def gauge(uuid: str, rounds: Sequence[Round], rule: Rule, fields: frozenset[str]) -> Line:
    """Compare a value round by round."""
    field = next((one for one in rule.fields if one in fields), None)
    if field is None:
        words = f"nvidia-smi has no {' or '.join(rule.fields)}"
        return Line(uuid, rule.metric, Finding.UNASKED, words, rule.why)
    counted: Counter[Finding] = Counter()
    worst, worst_by = "", -1.0
    for one in rounds:
        if not one.settled:
            continue
        ours = [side[uuid].values.get(rule.metric) for side in (one.before, one.after)]
        text = one.told.fields[uuid][field]
        theirs = None if is_absent(text) else number(field, text)
        if theirs is None and not is_absent(text):
            return Line(uuid, rule.metric, Finding.DIFFERED, f"{field} is {text!r}: no number")
        if theirs is not None and rule.bit:
            theirs = float(bool(int(theirs) & rule.bit))
        finding, by = agree(ours, theirs, rule)
        counted[finding] += 1
        if finding is Finding.DIFFERED and by > worst_by:
            worst, worst_by = f"; worst: {told(ours, theirs, rule)} ({one.phase})", by
    return verdict(uuid, rule, counted, f"{field}{worst}")


def agree(ours: Sequence[float | None], theirs: float | None, rule: Rule) -> tuple[Finding, float]:
    """Return whether one round agrees, and by how much it does not."""
    known = [value for value in ours if value is not None]
    if theirs is None or not known:
        one_sided = theirs is not None or bool(known)
        harmless = not any(known) and not theirs and rule.metric in OFTEN_ONE_SIDED
        return (Finding.DIFFERED if one_sided and not harmless else Finding.NEITHER), 0.0
    wanted = theirs * rule.scale
    room = rule.slack + rule.share * abs(wanted)
    beyond = max(min(known) - room - wanted, wanted - max(known) - room)
    return (Finding.AGREED if beyond <= 0 else Finding.DIFFERED), beyond


def verdict(uuid: str, rule: Rule, counted: Counter[Finding], words: str) -> Line:
    """Return what the rounds come to."""
    all_, good = sum(counted.values()), counted[Finding.AGREED] + counted[Finding.NEITHER]
    if not all_:
        return Line(uuid, rule.metric, Finding.UNASKED, "no round was steady", rule.why)
    said = f"{good} of {all_} rounds, {words}"
    if good < rule.rounds * all_:
        return Line(uuid, rule.metric, Finding.DIFFERED, said, rule.why)
    finding = Finding.NEITHER if counted[Finding.NEITHER] == all_ else Finding.AGREED
    return Line(uuid, rule.metric, finding, said, rule.why)


def told(ours: Sequence[float | None], theirs: float | None, rule: Rule) -> str:
    """Return both sides in words."""
    sides = " to ".join("nothing" if value is None else f"{value:g}" for value in ours)
    return f"{sides}, nvidia-smi {'nothing' if theirs is None else f'{theirs * rule.scale:g}'}"


def grown(uuid: str, rounds: Sequence[Round], rule: Grown, fields: frozenset[str]) -> Line:
    """Compare the growth of a counter within the phases with a sum of what nvidia-smi said."""
    name = rule.metric
    field = next((one for one in rule.fields if one in fields), None)
    if rule.fields and field is None:
        return Line(uuid, name, Finding.UNASKED, f"nvidia-smi has no {rule.fields[0]}", rule.why)
    passed = wanted = growth = room = 0.0
    quiet = ""
    for phase in dict.fromkeys(one.phase for one in rounds):
        steps = phase_of(uuid, [one for one in rounds if one.phase == phase], name, field)
        if steps.growth is None or steps.wanted is None:
            # of a card whose work nobody can tell (MIG) there is no observed time either
            one_sided = (steps.growth is None) != (steps.wanted is None) and field is not None
            finding = Finding.DIFFERED if one_sided else Finding.NEITHER
            has, says = steps.growth is not None, steps.wanted is not None
            said = f"ours is {'' if has else 'not '}there, {field} is {'' if says else 'not '}told"
            return Line(uuid, name, finding, f"{said} ({phase})", rule.why)
        if field is None and phase == QUIET and steps.growth <= steps.passed + LATE:
            # an idle card may write no samples, and what was not observed is not idle
            quiet = f"; while idle {steps.growth:.1f} of {steps.passed:.1f} s"
        elif steps.passed:
            expected = rule.scale * steps.wanted
            passed, growth, wanted = passed + steps.passed, growth + steps.growth, wanted + expected
            room += rule.share * expected + rule.slack * steps.passed
            room += LATE * expected / steps.passed
    if not passed:
        return Line(uuid, name, Finding.UNASKED, f"there was no load{quiet}", rule.why)
    finding = Finding.AGREED if abs(growth - wanted) <= room else Finding.DIFFERED
    said = f"grew by {growth:.2f} in {passed:.1f} s, {field or 'time'} says {wanted:.2f}"
    return Line(uuid, name, finding, f"{said} (within {room:.2f}){quiet}", rule.why)


class Steps(NamedTuple):
    """A phase: its seconds, by how much a counter grew, and what a field adds up to."""

    passed: float
    growth: float | None
    wanted: float | None


def phase_of(uuid: str, rounds: Sequence[Round], name: str, field: str | None) -> Steps:
    """Return what one phase comes to; without a field its time is what is added up."""
    first, last = (one.after[uuid].values.get(name) for one in (rounds[0], rounds[-1]))
    growth = None if first is None or last is None else last - first
    passed = rounds[-1].at - rounds[0].at
    if field is None:
        return Steps(passed, growth, passed)
    texts = [one.told.fields[uuid][field] for one in rounds]
    values = [None if is_absent(text) else number(field, text) for text in texts]
    return Steps(passed, growth, integral([one.at for one in rounds], values))


def integral(times: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Return the area below values at times; None where one is not known."""
    known = [value for value in values if value is not None]
    if len(known) != len(values) or not known:
        return None
    steps = zip(times, times[1:], known, known[1:])
    return sum((later - sooner) * (a + b) / 2 for sooner, later, a, b in steps)


def processes(uuid: str, rounds: Sequence[Round]) -> Line:
    """Compare who computes on a card; one that we cannot see makes ours absent, and that is so."""
    counted: Counter[Finding] = Counter()
    worst = ""
    for one in rounds:
        if not one.settled:
            continue
        name = PROCESSES.metric
        ours = [side[uuid].values.get(name) for side in (one.before, one.after)]
        theirs = len(one.told.pids[uuid])
        known = [value for value in ours if value is not None]
        good = not known or min(known) <= theirs <= max(known)
        counted[(Finding.AGREED if good else Finding.DIFFERED) if known else Finding.NEITHER] += 1
        worst = worst if good else f"; {told(ours, theirs, PROCESSES)} ({one.phase})"
    return verdict(uuid, PROCESSES, counted, f"--query-compute-apps{worst}")
