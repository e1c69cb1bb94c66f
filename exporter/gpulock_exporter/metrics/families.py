# SPDX-License-Identifier: Apache-2.0
"""What a family of metrics is, and how its labels are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

COUNTER, GAUGE = "counter", "gauge"
TOTAL = "_total"
UNITS = ("seconds", "bytes", "ratio", "joules", "watts", "celsius", "hertz")

# how a value of a label is written, in both formats alike
# Prometheus's own parser takes a NUL for the end of the text, so no control character is written;
# a surrogate is a byte that is no UTF-8, or half a character of JSON
ESCAPES = {
    **{code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))},
    **{ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n"},
}
LONGEST_LABEL = 256  # characters of a value


@dataclass(frozen=True, slots=True)
class Family:
    """A family: its full name (a counter's ends in `_total`), its kind, what it means."""

    name: str
    kind: str
    help: str

    @property
    def base(self) -> str:
        """Return the name without `_total`, which is OpenMetrics' own for the family."""
        return self.name.removesuffix(TOTAL)

    @property
    def unit(self) -> str:
        """Return the unit that the name ends in, empty where it has none."""
        unit = self.base.rpartition("_")[2]
        return unit if unit in UNITS else ""


@dataclass(slots=True)
class Metric:
    """A family with its values by labels, as they are written: no two of one name."""

    family: Family
    values: dict[str, float] = field(default_factory=dict[str, float])


def gauge(name: str, meaning: str) -> Family:
    """Return a family of values that go up and down."""
    return Family(f"gpulock_{name}", GAUGE, meaning)


def counter(name: str, meaning: str) -> Family:
    """Return a family of values that only grow."""
    return Family(f"gpulock_{name}{TOTAL}", COUNTER, meaning)


def labels(pairs: Iterable[tuple[str, str]]) -> str:
    """Return labels as they are written, those without a value left out."""
    return ",".join([f'{name}="{escaped(value)}"' for name, value in pairs if value])


def escaped(value: str) -> str:
    """Return the value of a label as it is written; bytes that are no UTF-8 are replaced."""
    if value.isascii() and value.isalnum():
        return value[:LONGEST_LABEL]
    return value[:LONGEST_LABEL].translate(ESCAPES)
