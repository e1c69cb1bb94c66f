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
    text = "".join([f"{key}={value}\n" for key, value in pairs])
    if text.count("\n") == len(pairs) and all([key and "=" not in key for key, _ in pairs]):
        line = text.replace("\n", " ")
        if line.isprintable() or is_single_line(line):
            return text
    wrong = [
        p
        for p in pairs
        if not p[0] or "=" in p[0] or not (is_single_line(p[0]) and is_single_line(p[1]))
    ]
    raise MalformedError(f"{wrong[0][0]!r}={wrong[0][1]!r} cannot be written on one line")


def decode_pairs(text: str, version: str = "") -> dict[str, str]:
    """Return the pairs of `text`, below the line `version` where that is given.

    Raises MalformedError for another version, a line without `=`, or a key twice.
    """
    if version:
        head, _, text = text.partition("\n")
        if head != version:
            raise MalformedError(f"begins with {head[:40]!r}, not with {version!r}")
    lines = [line.split("=", 1) for line in text.split("\n") if line]
    pairs: dict[str, str] = {}
    try:
        pairs = dict(lines)
    except ValueError:
        pass
    if len(pairs) == len(lines) and "" not in pairs:
        return pairs
    for line in lines:
        if len(line) == 1 or not line[0]:
            raise MalformedError(f"not a key=value line: {'='.join(line)[:80]!r}")
    keys = sorted([line[0] for line in lines])
    twice = next(one for one, other in zip(keys, keys[1:]) if one == other)
    raise MalformedError(f"{twice} is given twice")


def int_or_zero(text: str) -> int:
    """Return a whole number of at most 30 digits, 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS else 0
