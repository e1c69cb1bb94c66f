# SPDX-License-Identifier: Apache-2.0
"""The comparison of a raw dump: what the exporter served beside what nvidia-smi said. Pure.

`python -m tests.gpu.compare docs/hardware/RECORD.json` compares a record again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from gpulock_exporter.metrics.device_table import CLOCK_REASONS
from prometheus_client.parser import text_string_to_metric_families

from gpulock.daemon.health.findings import ACTIONS

PREFIX = "gpulock_gpu_"
MIB = float(1 << 20)
Values = dict[str, float]  # of a card, by name


class Rule(NamedTuple):
    """A metric, and the fields that say the same: the first that this nvidia-smi knows counts.

    Both are means over all rounds. Ours is theirs times `scale`, give or take `slack` and a `share`
    of it. `bit` picks one of a mask. Of a counter (`rate`) it is the growth a second. Where the
    hardware counts nothing one side may say 0 and the other nothing (`zero`).
    """

    metric: str
    fields: tuple[str, ...]
    scale: float = 1.0
    slack: float = 0.0
    share: float = 0.0
    bit: int = 0
    rate: bool = False
    zero: bool = False


INFO = {  # label of gpulock_gpu_info: field
    "name": "name",
    "pci_bus_id": "pci.bus_id",
    "driver_version": "driver_version",
    "gpu": "index",
    "mig_mode": "mig.mode.current",
    "persistence_mode": "persistence_mode",
}
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
        Rule(
            f"clock_event_active {name}",
            ("clocks_event_reasons.active",),
            slack=0.25,  # it may come and go between two looks
            bit=1 << number,
        )
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
    Rule("busy_seconds_total", ("utilization.gpu",), 0.01, 0.05, 0.05, rate=True),
    Rule("energy_joules_total", ("power.draw",), 1.0, 5.0, 0.15, rate=True),
)
ASKED = tuple(dict.fromkeys([*[of for rule in RULES for of in rule.fields], *INFO.values()]))
_WORDS = {
    **{"yes": 1.0, "no": 0.0, "active": 1.0, "not active": 0.0},
    # nvmlDeviceGpuRecoveryAction_t of nvml.h, as nvidia-smi words it
    **{"none": 0.0, "reset": 1.0, "gpu reset": 1.0, "reboot": 2.0, "node reboot": 2.0},
    **{"drain p2p": 3.0, "drain and reset": 4.0},
}


def read_scrape(text: str) -> tuple[dict[str, Values], dict[str, dict[str, str]]]:
    """Return the values of each card of a scrape, and the labels of its `info`, by UUID.

    A name is the metric's without `gpulock_gpu_`, with its further labels: `ecc_errors_total` of
    type corrected and location dram is `ecc_errors_total dram corrected`, by the labels' names.
    """
    cards: dict[str, Values] = {}
    info: dict[str, dict[str, str]] = {}
    actions = {name: float(number) for number, name in ACTIONS.items()}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            uuid = labels.get("uuid", "")
            if name == f"{PREFIX}info" and "parent_uuid" not in labels:
                info[uuid] = labels
            elif name.startswith(PREFIX) and uuid:
                more = [of for key, of in sorted(labels.items()) if key not in {"uuid", "gpu"}]
                values = cards.setdefault(uuid, {})
                values[" ".join([name[len(PREFIX) :], *more])] = value
                if name == f"{PREFIX}recovery_action" and value:
                    values["recovery_action"] = actions[labels["action"]]
    return cards, info


def read_single(text: str, metric: str) -> float | None:
    """Return the value of a metric that has no labels, None where there is none."""
    lines = (line.split() for line in text.splitlines())
    return next((float(words[1]) for words in lines if words[:1] == [metric]), None)


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


def compare_dump(dump: Mapping[str, Any]) -> list[str]:
    """Return what differs, a line each: between the rounds of scrape and nvidia-smi, and /proc."""
    rounds: Sequence[Mapping[str, Any]] = dump["rounds"]
    scrapes = [read_scrape("\n".join(one["metrics"]) + "\n") for one in rounds]
    at = [
        read_single("\n".join(one["metrics"]), "gpulock_sample_timestamp_seconds") for one in rounds
    ]
    seconds = (at[-1] or 0.0) - (at[0] or 0.0)
    wrong = compare_devices(dump["proc"], dump["nvml"]["cards"])
    for uuid, row in rounds[-1]["nvidia-smi"].items():
        wrong += [f"{uuid}  {line}" for line in compare_info(scrapes[-1][1].get(uuid, {}), row)]
        ours = [cards.get(uuid, {}) for cards, _ in scrapes]
        theirs = [one["nvidia-smi"].get(uuid, {}) for one in rounds]
        wrong += [f"{uuid}  {line}" for line in compare_values(ours, theirs, seconds)]
    return wrong


def compare_devices(
    devices: Sequence[Mapping[str, Any]], cards: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Say where /proc, as gpulock reads it, differs from NVML's devices and their order."""
    wrong = [f"/proc has {len(devices)} GPUs, NVML {len(cards)}"] * (len(devices) != len(cards))
    for index, (device, card) in enumerate(zip(devices, cards)):
        identity = {**card["identity"], "bus_id": kernel_bus(card["identity"]["bus_id"])}
        wrong += [
            f"GPU {index}: {what} is {device[what]} in /proc, {identity[what]} in NVML"
            for what in ("bus_id", "minor", "uuid")
            if device[what] != identity[what]
        ]
    return wrong


def compare_info(labels: Mapping[str, str], row: Mapping[str, str]) -> list[str]:
    """Say where the labels of a card's `info` differ."""
    wrong: list[str] = []
    for label, field in INFO.items():
        if field not in row:
            continue  # this nvidia-smi has no such field
        ours, text = labels.get(label, ""), row[field]
        theirs = "" if text.startswith("[") else FLAGS.get(text, text)
        theirs = kernel_bus(theirs) if label == "pci_bus_id" else theirs
        if ours != theirs:
            wrong.append(f"info {label}: {ours!r}, nvidia-smi {theirs!r}")
    return wrong


def compare_values(
    ours: Sequence[Values], theirs: Sequence[Mapping[str, str]], seconds: float
) -> list[str]:
    """Say where the values of a card differ, each list having one of each round."""
    wrong: list[str] = []
    for rule in RULES:
        field = next((one for one in rule.fields if one in theirs[-1]), "")
        if not field:
            continue  # this nvidia-smi has no such field
        try:
            said = [parse_number(row.get(field, "")) for row in theirs]
        except ValueError as fault:
            wrong.append(f"{rule.metric}: {field}: {fault}")
            continue
        served = [values.get(rule.metric) for values in ours]
        if not agrees(rule, served, said, seconds):
            wrong.append(f"{rule.metric}: {field}: {served} beside {said}")
    return wrong


def agrees(
    rule: Rule, ours: Sequence[float | None], theirs: Sequence[float | None], seconds: float
) -> bool:
    """Return whether two lists of values, one of each round, say the same."""
    served = [value for value in ours if value is not None]
    said = [value for value in theirs if value is not None]
    if not served or not said:
        return (not served and not said) or (rule.zero and not any(served) and not any(said))
    if rule.bit:
        said = [float(bool(int(value) & rule.bit)) for value in said]
    wanted = mean(said) * rule.scale
    found = (served[-1] - served[0]) / seconds if rule.rate and seconds else mean(served)
    return abs(found - wanted) <= rule.slack + rule.share * abs(wanted)


def main(paths: Iterable[str]) -> int:
    """Compare records; return the exit code."""
    wrong = [line for path in paths for line in compare_dump(json.loads(Path(path).read_text()))]
    print(*(f"DIFFERS  {line}" for line in wrong), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
