# SPDX-License-Identifier: Apache-2.0
"""The comparison of rounds of scrape, nvidia-smi, scrape: what agreed and what differed. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.gpu.rules import INFO, RULES, Rule
from tests.gpu.smi import PROCESSES, Rows, is_absent, parse_number

PREFIX = "gpulock_gpu_"
FLAGS = {"Enabled": "1", "Disabled": "0"}  # of mig_mode and persistence_mode
QUIET = "idle"  # the phase without a load
LATE = 1.2  # seconds by which a counter lags behind: it moves once a look


class Card(NamedTuple):
    """One card: the labels of its `info`, and its values by name.

    A name is the metric's without `gpulock_gpu_`, with its further labels: `ecc_errors_total` of
    type corrected and location dram is `ecc_errors_total dram corrected`, by the labels' names.
    """

    info: Mapping[str, str]
    values: dict[str, float]


class Round(NamedTuple):
    """What was said at one moment: our scrapes before and after nvidia-smi.

    `at` is when the latter's sample was taken, in seconds of the epoch. `phase` says under which
    load; `settled` that it is not just changing.
    """

    at: float
    phase: str
    settled: bool
    before: Mapping[str, Card]
    rows: Rows
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


def parse_cards(text: str) -> dict[str, Card]:
    """Return the cards of a scrape by UUID; what is of no card is left out."""
    cards: dict[str, Card] = {}
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    for sample in samples:
        if sample.name == f"{PREFIX}info":
            cards[sample.labels["uuid"]] = Card(sample.labels, {})
    for name, labels, value, *_ in samples:
        card = cards.get(labels.get("uuid", ""))
        if name.startswith(PREFIX) and card:
            more = [text for key, text in sorted(labels.items()) if key not in {"uuid", "gpu"}]
            card.values[" ".join([name[len(PREFIX) :], *more])] = value
    return cards


def parse_single(text: str, metric: str) -> float | None:
    """Return the value of a metric that has no labels, None where there is none."""
    matched = re.search(rf"(?m)^{re.escape(metric)} (\S+)$", text)
    return float(matched[1]) if matched else None


def kernel_bus(text: str) -> str:
    """Return a bus id as the kernel writes it: nvidia-smi's and NVML's domain has eight digits."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else text


def judge(rounds: Sequence[Round], known: Iterable[str]) -> list[Line]:
    """Return every comparison; `known` are the fields that nvidia-smi was asked for."""
    fields = {*known, PROCESSES}
    lines: list[Line] = []
    for uuid in sorted({uuid for one in rounds for uuid in (*one.rows, *one.after)}):
        here = [r for r in rounds if uuid in r.before and uuid in r.after and uuid in r.rows]
        if not here:
            words = "it is not in all of /metrics and nvidia-smi"
            lines.append(Line(uuid, "info", Finding.DIFFERED, words))
            continue
        lines += identity(uuid, here[-1])
        for rule in RULES:
            field = next((one for one in rule.fields if one in fields), "")
            if rule.fields and not field:
                words = f"nvidia-smi has no {' or '.join(rule.fields)}"
                lines.append(Line(uuid, rule.metric, Finding.UNASKED, words, rule.why))
            else:
                lines.append((counter if rule.grows else gauge)(uuid, here, rule, field))
    return lines


def identity(uuid: str, one: Round) -> list[Line]:
    """Compare what a card is."""
    lines: list[Line] = []
    for label, field in INFO.items():
        text = one.rows[uuid].get(field, "")
        ours, theirs = one.after[uuid].info.get(label, ""), "" if is_absent(text) else text
        theirs = kernel_bus(theirs) if label == "pci_bus_id" else FLAGS.get(theirs, theirs)
        finding = Finding.AGREED if ours == theirs else Finding.DIFFERED
        if not ours and not theirs:
            finding = Finding.NEITHER
        lines.append(Line(uuid, f"info {label}", finding, f"{ours!r}, nvidia-smi {theirs!r}"))
    return lines


def gauge(uuid: str, rounds: Sequence[Round], rule: Rule, field: str) -> Line:
    """Compare a value round by round."""
    counts: Counter[Finding] = Counter()
    worst, worst_by = "", -1.0
    for one in rounds:
        if not one.settled:
            continue
        ours = [side[uuid].values.get(rule.metric) for side in (one.before, one.after)]
        text = one.rows[uuid][field]
        theirs = None if is_absent(text) else parse_number(text)
        if theirs is None and not is_absent(text):
            return Line(uuid, rule.metric, Finding.DIFFERED, f"{field} is {text!r}: no number")
        if theirs is not None and rule.bit:
            theirs = float(bool(int(theirs) & rule.bit))
        finding, by = agree(ours, theirs, rule)
        counts[finding] += 1
        if finding is Finding.DIFFERED and by > worst_by:
            shown = " to ".join("nothing" if value is None else f"{value:g}" for value in ours)
            scaled = "nothing" if theirs is None else f"{theirs * rule.scale:g}"
            worst, worst_by = f"; worst: {shown}, nvidia-smi {scaled} ({one.phase})", by
    total, good = sum(counts.values()), counts[Finding.AGREED] + counts[Finding.NEITHER]
    if not total:
        return Line(uuid, rule.metric, Finding.UNASKED, "no round was steady", rule.why)
    finding = Finding.NEITHER if counts[Finding.NEITHER] == total else Finding.AGREED
    finding = finding if good >= rule.rounds * total else Finding.DIFFERED
    words = f"{good} of {total} rounds, {field}{worst}"
    return Line(uuid, rule.metric, finding, words, rule.why)


def agree(ours: Sequence[float | None], theirs: float | None, rule: Rule) -> tuple[Finding, float]:
    """Return whether one round agrees, and by how much it does not."""
    known = [value for value in ours if value is not None]
    if theirs is None or not known:
        zero = rule.one_sided == "zero" and not any(known) and not theirs
        absent = rule.one_sided == "not ours" and not known
        alone = (theirs is not None or known) and not zero and not absent
        return (Finding.DIFFERED if alone else Finding.NEITHER), 0.0
    wanted = theirs * rule.scale
    room = rule.slack + rule.share * abs(wanted)
    beyond = max(min(known) - room - wanted, wanted - max(known) - room)
    return (Finding.AGREED if beyond <= 0 else Finding.DIFFERED), beyond


def counter(uuid: str, rounds: Sequence[Round], rule: Rule, field: str) -> Line:
    """Compare the growth of a counter within the phases with a sum of what nvidia-smi said."""
    passed = wanted = growth = room = 0.0
    quiet = ""
    for phase in dict.fromkeys(one.phase for one in rounds):
        here = [one for one in rounds if one.phase == phase]
        first, last = (one.after[uuid].values.get(rule.metric) for one in (here[0], here[-1]))
        took = here[-1].at - here[0].at
        area = area_below(uuid, here, field) if field else took
        if first is None or last is None or area is None:
            # of a card whose work nobody can tell (MIG) there is no observed time either
            alone = field and (first is not None and last is not None) != (area is not None)
            words = f"one of ours and {field or 'time'} is not there ({phase})"
            finding = Finding.DIFFERED if alone else Finding.NEITHER
            return Line(uuid, rule.metric, finding, words, rule.why)
        if not field and phase == QUIET and last - first <= took + LATE:
            # an idle card may write no samples, and what was not observed is not idle
            quiet = f"; while idle {last - first:.1f} of {took:.1f} s"
        elif took:
            expected = rule.scale * area
            passed, growth, wanted = passed + took, growth + last - first, wanted + expected
            room += rule.share * expected + rule.slack * took + LATE * expected / took
    if not passed:
        return Line(uuid, rule.metric, Finding.UNASKED, f"there was no load{quiet}", rule.why)
    finding = Finding.AGREED if abs(growth - wanted) <= room else Finding.DIFFERED
    words = f"grew by {growth:.2f} in {passed:.1f} s, {field or 'time'} says {wanted:.2f}"
    return Line(uuid, rule.metric, finding, f"{words} (within {room:.2f}){quiet}", rule.why)


def area_below(uuid: str, rounds: Sequence[Round], field: str) -> float | None:
    """Return the area below a field by time; None where one value is not known."""
    values = [parse_number(one.rows[uuid][field]) for one in rounds]
    if None in values:
        return None
    known = [value or 0.0 for value in values]
    steps = zip(rounds, rounds[1:], known, known[1:])
    return sum((later.at - sooner.at) * (a + b) / 2 for sooner, later, a, b in steps)
