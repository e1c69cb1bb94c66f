# SPDX-License-Identifier: Apache-2.0
"""The comparison of rounds of scrape, nvidia-smi, scrape. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from gpulock_exporter.metrics.device_table import CLOCK_REASONS
from prometheus_client.parser import text_string_to_metric_families

from gpulock.daemon.health.findings import ACTIONS as RECOVERY_ACTIONS

PREFIX = "gpulock_gpu_"
MIB = float(1 << 20)
LATE = 1.2  # seconds by which a counter lags behind: it moves once a look
STEADY = 0.75  # part of the rounds that must agree: a value moves between two looks
Rows = Mapping[str, Mapping[str, str]]  # the text of each field of nvidia-smi, by UUID
Cards = Mapping[str, Mapping[str, float]]  # values by name, by UUID


class Rule(NamedTuple):
    """A metric, and the fields that say the same: the first that this nvidia-smi knows is asked.

    What it says times `scale` lies between two scrapes, give or take `slack` and a `share` of it.
    `bit` picks one of a mask. A counter `grows` by the area below the field, `slack` being for each
    second. Where the hardware counts nothing one side may say 0 and the other nothing (`zero`).
    """

    metric: str
    fields: tuple[str, ...]
    scale: float = 1.0
    slack: float = 0.0
    share: float = 0.0
    bit: int = 0
    grows: bool = False
    zero: bool = False


INFO = {  # label of gpulock_gpu_info: field
    "name": "name",
    "pci_bus_id": "pci.bus_id",
    "driver_version": "driver_version",
    "gpu": "index",
    "mig_mode": "mig.mode.current",
    "persistence_mode": "persistence_mode",
}
ACTIONS = {name: float(number) for number, name in RECOVERY_ACTIONS.items()}
FLAGS = {"Enabled": "1", "Disabled": "0"}
_PLACES = {  # ours: nvidia-smi's
    **{"dram": "dram", "sram": "sram", "l1": "l1_cache", "l2": "l2_cache"},
    **{"register": "register_file", "texture": "texture_memory", "cbu": "cbu"},
}
RULES = (
    Rule("utilization_ratio", ("utilization.gpu",), 0.01, 0.10),
    Rule("memory_utilization_ratio", ("utilization.memory",), 0.01, 0.10),
    Rule("memory_used_bytes", ("memory.used",), MIB, 8 * MIB),
    Rule("memory_total_bytes", ("memory.total",), MIB, MIB),
    Rule("power_watts", ("power.draw.instant", "power.draw"), 1.0, 15.0, 0.10),
    Rule("power_limit_watts", ("power.limit",), slack=1.0),
    Rule("power_limit_enforced_watts", ("enforced.power.limit",), slack=1.0),
    Rule("temperature_celsius", ("temperature.gpu",), slack=2.0),
    Rule("memory_temperature_celsius", ("temperature.memory",), slack=4.0),
    Rule("sm_clock_hertz", ("clocks.sm",), 1e6, 30e6, 0.05),
    Rule("memory_clock_hertz", ("clocks.mem",), 1e6, 1e6, 0.01),
    Rule("pcie_generation_max", ("pcie.link.gen.max",)),
    Rule("pcie_width_lanes", ("pcie.link.width.current",)),
    Rule("pcie_width_max_lanes", ("pcie.link.width.max",)),
    Rule("fan_ratio", ("fan.speed",), 0.01, 0.1),
    Rule("remapped_rows correctable", ("remapped_rows.correctable",)),
    Rule("remapped_rows uncorrectable", ("remapped_rows.uncorrectable",)),
    Rule("remapped_rows_pending", ("remapped_rows.pending",)),
    Rule("remapped_rows_failure", ("remapped_rows.failure",)),
    Rule("recovery_action", ("gpu_recovery_action",)),
    *(
        Rule(f"clock_event_active {name}", ("clocks_event_reasons.active",), bit=1 << number)
        for number, name in enumerate(CLOCK_REASONS)
    ),
    *(
        Rule(
            f"ecc_errors_total {place} {kind}",
            (f"ecc.errors.{kind}.volatile.{field}",),
            zero=place not in {"dram", "sram"},
        )
        for kind in ("corrected", "uncorrected")
        for place, field in _PLACES.items()
    ),
    Rule("busy_seconds_total", ("utilization.gpu",), 0.01, 0.05, 0.05, grows=True),
    Rule("energy_joules_total", ("power.draw",), 1.0, 5.0, 0.15, grows=True),
)
ASKED = tuple(
    dict.fromkeys(
        field
        for fields in (*(rule.fields for rule in RULES), tuple(INFO.values()))
        for field in fields
    )
)
_WORDS = {
    **{"yes": 1.0, "no": 0.0, "active": 1.0, "not active": 0.0},
    # nvmlDeviceGpuRecoveryAction_t of nvml.h, as nvidia-smi words it
    **{"none": 0.0, "reset": 1.0, "gpu reset": 1.0, "reboot": 2.0, "node reboot": 2.0},
    **{"drain p2p": 3.0, "drain and reset": 4.0},
}


class Round(NamedTuple):
    """What was said at one moment: our scrapes before and after nvidia-smi.

    `at` is when the latter's sample was taken, in seconds of the epoch.
    """

    at: float
    before: Cards
    rows: Rows
    after: Cards


class Finding(Enum):
    """How a comparison ended."""

    AGREED = "agreed"
    ABSENT = "neither has it"
    DIFFERED = "DIFFERED"
    UNASKED = "this nvidia-smi has no such field"


class Line(NamedTuple):
    """One comparison of one card; `words` have the numbers."""

    uuid: str
    metric: str
    finding: Finding
    words: str = ""


def parse_cards(text: str) -> dict[str, dict[str, float]]:
    """Return the values of each card of a scrape.

    A name is the metric's without `gpulock_gpu_`, with its further labels: `ecc_errors_total` of
    type corrected and location dram is `ecc_errors_total dram corrected`, by the labels' names.
    """
    cards: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name.startswith(PREFIX) and name != f"{PREFIX}info" and "uuid" in labels:
                more = [text for key, text in sorted(labels.items()) if key not in {"uuid", "gpu"}]
                words = " ".join([name[len(PREFIX) :], *more])
                values = cards.setdefault(labels["uuid"], {})
                values[words] = value
                if name == f"{PREFIX}recovery_action" and value:
                    values["recovery_action"] = ACTIONS[labels["action"]]
    return cards


def parse_info(text: str) -> dict[str, dict[str, str]]:
    """Return the labels of each card's `info` of a scrape."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    cards = [one.labels for one in samples if one.name == f"{PREFIX}info"]
    return {labels["uuid"]: labels for labels in cards if "parent_uuid" not in labels}


def kernel_bus(text: str) -> str:
    """Return a bus id as the kernel writes it: nvidia-smi's and NVML's domain has eight digits."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else text


def parse_number(text: str) -> float | None:
    """Return what a field says as a number, None where the card has none: a bit mask is one.

    Raises ValueError where it says anything else.
    """
    word = text.lower()
    if word.startswith("[") or word in {"", "n/a"}:
        return None
    if word in _WORDS:
        return _WORDS[word]
    return float(int(text, 16)) if word.startswith("0x") else float(text)


def compare_info(info: Mapping[str, Mapping[str, str]], rows: Rows) -> list[Line]:
    """Compare what each card is."""
    lines: list[Line] = []
    for uuid in sorted({*info, *rows}):
        for label, field in INFO.items():
            ours, text = info.get(uuid, {}).get(label, ""), rows.get(uuid, {}).get(field, "")
            theirs = "" if text.startswith("[") else FLAGS.get(text, text)
            theirs = kernel_bus(theirs) if label == "pci_bus_id" else theirs
            finding = Finding.AGREED if ours == theirs else Finding.DIFFERED
            lines.append(Line(uuid, f"info {label}", finding, f"{ours!r}, nvidia-smi {theirs!r}"))
    return lines


def compare_values(rounds: Sequence[Round], known: Iterable[str]) -> list[Line]:
    """Compare the values of each card; `known` are the fields that nvidia-smi was asked for."""
    fields = frozenset(known)
    lines: list[Line] = []
    for uuid in sorted({uuid for one in rounds for uuid in one.rows}):
        for rule in RULES:
            field = next((one for one in rule.fields if one in fields), "")
            if not field:
                lines.append(Line(uuid, rule.metric, Finding.UNASKED, " or ".join(rule.fields)))
                continue
            try:
                finding, words = (compare_growth if rule.grows else compare_rounds)(
                    uuid, rounds, rule, field
                )
            except ValueError as fault:
                finding, words = Finding.DIFFERED, str(fault)
            lines.append(Line(uuid, rule.metric, finding, f"{field}: {words}"))
    return lines


def compare_rounds(
    uuid: str, rounds: Sequence[Round], rule: Rule, field: str
) -> tuple[Finding, str]:
    """Compare a value round by round; raise ValueError where it is no number."""
    findings: list[Finding] = []
    worst = ""
    for one in rounds:
        ours = [side.get(uuid, {}).get(rule.metric) for side in (one.before, one.after)]
        theirs = parse_number(one.rows[uuid][field])
        findings.append(compare_once(ours, theirs, rule))
        if findings[-1] is Finding.DIFFERED:
            worst = f", once {ours[0]} to {ours[1]} beside {theirs}"
    good = len(findings) - findings.count(Finding.DIFFERED)
    words = f"{good} of {len(findings)} rounds{worst}"
    if good < STEADY * len(findings):
        return Finding.DIFFERED, words
    return (Finding.AGREED if Finding.AGREED in findings else Finding.ABSENT), words


def compare_once(ours: Sequence[float | None], theirs: float | None, rule: Rule) -> Finding:
    """Return how one round ended."""
    values = [value for value in ours if value is not None]
    if theirs is None or not values:
        both = theirs is None and not values
        zero = rule.zero and not any(values) and not theirs
        return Finding.ABSENT if both or zero else Finding.DIFFERED
    wanted = float(bool(int(theirs) & rule.bit)) if rule.bit else theirs * rule.scale
    room = rule.slack + rule.share * abs(wanted)
    agreed = min(values) - room <= wanted <= max(values) + room
    return Finding.AGREED if agreed else Finding.DIFFERED


def compare_growth(
    uuid: str, rounds: Sequence[Round], rule: Rule, field: str
) -> tuple[Finding, str]:
    """Compare a counter's growth with the area below a field; raise ValueError for no number."""
    first, last = (one.after.get(uuid, {}).get(rule.metric) for one in (rounds[0], rounds[-1]))
    numbers = [parse_number(one.rows[uuid][field]) for one in rounds]
    known = [number for number in numbers if number is not None]
    if first is None or last is None or len(known) < len(numbers):
        alone = (first is None) is not (not known)
        return (Finding.DIFFERED if alone else Finding.ABSENT), "one of them is not there"
    took = rounds[-1].at - rounds[0].at
    steps = zip(rounds, rounds[1:], known, known[1:])
    area = sum((later.at - sooner.at) * (a + b) / 2 for sooner, later, a, b in steps) * rule.scale
    room = rule.share * area + rule.slack * took + (LATE * area / took if took else 0.0)
    finding = Finding.AGREED if abs(last - first - area) <= room else Finding.DIFFERED
    return finding, f"grew by {last - first:.2f} in {took:.1f} s beside {area:.2f} (+- {room:.2f})"


def parse_single(text: str, metric: str) -> float | None:
    """Return the value of a metric that has no labels, None where there is none."""
    matched = re.search(rf"(?m)^{re.escape(metric)} (\S+)$", text)
    return float(matched[1]) if matched else None
