# SPDX-License-Identifier: Apache-2.0
"""Flat `key=value` lines: the format of every small file that gpulock writes.

Hot: loaded by every hook, so it imports nothing.
"""

DIGITS = 30  # of a number that is believed: Python reads no more than 4300


class MalformedError(ValueError):
    """Say that a text is not what its format promises."""


def is_single_line(value: str) -> bool:
    """Return whether `value` may stand on one line: no control character in it."""
    return value.isprintable() or not any(c < " " or c == "\x7f" for c in value)


def encode_pairs(pairs: "list[tuple[str, str]]") -> str:
    """Return the pairs as lines; raise MalformedError for a control character or a bad key."""
    for key, value in pairs:
        if not key or "=" in key or not is_single_line(key + value):
            raise MalformedError(f"{key!r}={value!r} cannot be written on one line")
    return "".join([f"{key}={value}\n" for key, value in pairs])


def decode_pairs(text: str, version: str = "") -> dict[str, str]:
    """Return the pairs of `text`, below the line `version` where that is given.

    Raises MalformedError for another version, a line without `=`, or a key twice.
    """
    if version:
        head, _, text = text.partition("\n")
        if head != version:
            raise MalformedError(f"begins with {head[:40]!r}, not with {version!r}")
    pairs: dict[str, str] = {}
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if key in pairs:
            raise MalformedError(f"{key} is given twice")
        if key and equals:
            pairs[key] = value
        elif line:
            raise MalformedError(f"not a key=value line: {line[:80]!r}")
    return pairs


def int_or_zero(text: str) -> int:
    """Return a whole number of at most 30 digits, 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS else 0
