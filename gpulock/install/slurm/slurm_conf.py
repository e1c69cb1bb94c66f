# SPDX-License-Identifier: Apache-2.0
"""Slurm's configuration: what `scontrol show config` prints, and the files it is made from.

Parsing is pure; keys are lower case, since Slurm does not mind. What is not set is not there.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from gpulock.errors import shorten
from gpulock.install.files import InstallError
from gpulock.store import atomic

LARGEST: Final = 1 << 22  # bytes of one file: a cluster of thousands of nodes has some 100 KB
_DEPTH: Final = 8  # of Include
_LONGEST_LIST: Final = 1 << 16  # names: more than any cluster has
_NO_VALUE: Final = ("", "(null)", "(null type)", "none")
_UNLIMITED: Final = 65534  # NO_VAL16 of slurm.h, which 22.05 prints for "no PrologEpilogTimeout"
_PAIR: Final = re.compile(r'([A-Za-z]\w*)\s*=\s*("[^"]*"|\S+)')
_INCLUDE: Final = re.compile(r"\s*include\s+(\S+)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class SlurmConf:
    """What slurmctld goes by, or what a file sets."""

    values: dict[str, str]

    def get(self, key: str) -> str:
        """Return a value, empty where it is not set; newer releases take several programs."""
        return self.values.get(key.lower(), "")

    def words(self, key: str) -> list[str]:
        """Return the entries of a comma separated list, as they are written."""
        return [word.strip() for word in self.get(key).split(",") if word.strip()]

    def has(self, key: str, *words: str) -> bool:
        """Say whether a list holds one of some words, or a range like `80-82` in it does."""
        for listed in self.words(key):
            span = re.fullmatch(r"(\d+)-(\d+)", listed)
            for word in words:
                if span and word.isdigit() and int(span[1]) <= int(word) <= int(span[2]):
                    return True
                if word.lower() == listed.lower():
                    return True
        return False

    def seconds(self, key: str) -> int | None:
        """Return a time, None where it is not set or has no end."""
        number = re.match(r"\d+", self.get(key))
        return int(number[0]) if number and int(number[0]) != _UNLIMITED else None


def parse_scontrol_config(text: str) -> SlurmConf:
    """Return what slurmctld goes by, as `scontrol show config` prints it; raise InstallError."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        name = re.sub(r"\[\d+\]$", "", key.strip()).lower()  # Prolog[1]: Slurm 24.05 and later
        if not equals or not name.isidentifier():
            continue
        value = value.strip()
        if value.lower() in _NO_VALUE:
            continue
        values[name] = (
            f"{values[name]}\n{value}" if key.strip().endswith("]") and name in values else value
        )
    if "slurm_version" not in values:
        raise InstallError(
            "scontrol show config prints no SLURM_VERSION; is that Slurm's scontrol?"
        )
    return SlurmConf(values)


def read_slurm_conf(path: Path) -> SlurmConf:
    """Return what a file like slurm.conf sets, with all that it includes; raise InstallError."""
    values: dict[str, str] = {}
    for _, line in read_slurm_lines(path):
        values |= {key.lower(): value.strip('"') for key, value in _PAIR.findall(line)}
    return SlurmConf({k: value for k, value in values.items() if value.lower() not in _NO_VALUE})


def read_node_lines(path: Path, node: str) -> list[dict[str, str]]:
    """Return what the lines of a file of Slurm's say of a node; raise InstallError.

    Such a line has `NodeName=` with it, or is for all nodes. Keys are in lower case.
    """
    rows: list[dict[str, str]] = []
    for _, line in read_slurm_lines(path):
        pairs = {name.lower(): value.strip('"') for name, value in _PAIR.findall(line)}
        listed = pairs.pop("nodename", "")
        if pairs and (not listed or node in expand_bracket_ranges(listed, path.name)):
            rows.append(pairs)
    return rows


def expand_bracket_ranges(text: str, file: str) -> list[str]:
    """Return the names of `nvidia[0-1,3],n[01-02]` in their order; raise InstallError; pure."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_expand_number_ranges(p, file) if n % 2 else [p] for n, p in enumerate(pieces)]
        _check_length(len(names) + math.prod(map(len, choices)), text, file)
        names += ["".join(words) for words in product(*choices)]
    return names


def _expand_number_ranges(text: str, file: str) -> list[str]:
    expanded: list[str] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise InstallError(f"[{text}] is no list of numbers; look at {file}")
        numbers = range(int(first), int(last if dash else first) + 1)
        _check_length(len(expanded) + len(numbers), text, file)
        expanded += [str(number).zfill(len(first)) for number in numbers]
    return expanded


def _check_length(count: int, text: str, file: str) -> None:
    if count > _LONGEST_LIST:
        raise InstallError(f"{shorten(text)} has more than {_LONGEST_LIST} names; look at {file}")


def read_slurm_lines(path: Path, depth: int = 0) -> Iterator[tuple[Path, str]]:
    """Yield each line as Slurm reads it, with its file; raise InstallError.

    One that ends in a backslash is one with the next. Those of included files stand where they are
    included; plugstack.conf names such files by a pattern, and they need not be there.
    """
    if depth > _DEPTH:
        raise InstallError(f"{path}: Include within Include without end; look at it")
    text = read_slurm_file(path).decode("utf-8", "surrogateescape")
    for raw in re.split(r"(?<!\\)\n", text):
        bare = re.sub(r"(?<!\\)#.*", "", raw.replace("\\\n", " ")).strip()
        if include := _INCLUDE.match(bare):
            for file in sorted(glob.glob(str(path.parent / include[1].strip('"')))):
                yield from read_slurm_lines(Path(file), depth + 1)
        elif bare:
            yield path, bare


def read_slurm_file(path: Path) -> bytes:
    """Return the bytes of a configuration file; raise InstallError."""
    try:
        return atomic.read_file(str(path.resolve()), LARGEST)
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; look at it") from fault
