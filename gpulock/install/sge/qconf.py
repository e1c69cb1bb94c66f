# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's configuration: qconf as a program with a deadline, and what it prints, parsed.

The parsers are pure and take what any qconf prints, long lines broken up with backslashes
included; we ask for whole lines (SGE_SINGLE_LINE), but old versions do not know it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpulock.daemon.slots.rsmap import split_sge_elements
from gpulock.install.files import InstallError, run_program

NONE: Final = "none"  # in any case: NONE in queues and hosts, none in configurations
_NO_ADMIN_HOST: Final = re.compile(r'denied: host "(\S+)" is not an admin host')  # it reads nothing
COMPLEX_FIELDS: Final = 8  # name shortcut type relop requestable consumable default urgency


class QconfError(InstallError):
    """Say that Grid Engine did not do or show what was asked."""


class Qconf:
    """Grid Engine's clients in one folder, with the environment that leads to its qmaster."""

    def __init__(self, binaries: Path, env: Mapping[str, str], seconds: float = 20.0) -> None:
        self.binaries = binaries
        self.env = {"PATH": "/usr/bin:/bin", "SGE_SINGLE_LINE": "1", **env}
        self.seconds = seconds

    def run(self, program: str, *args: str) -> str:
        """Return what a client prints; raise QconfError when it fails or hangs."""
        line = [str(self.binaries / program), *args]
        try:
            done = run_program(line, self.seconds, self.env, errors="surrogateescape")
        except subprocess.TimeoutExpired as late:
            raise QconfError(
                f"{program} did not answer in {self.seconds:g} s; is qmaster up?"
            ) from late
        except OSError as fault:
            raise QconfError(f"{line[0]}: {fault.strerror}; set SGE_BINARIES") from fault
        if done.returncode != 0:
            said = (done.stderr + done.stdout).strip().replace("\n", " ")[:300]
            if denied := _NO_ADMIN_HOST.search(said):
                said += f"; on the master: qconf -ah {denied[1]}"
            raise QconfError(f"{program} {' '.join(args)[:100]} failed: {said or 'no message'}")
        return done.stdout

    def show(self, *args: str) -> dict[str, str]:
        """Return an object as qconf shows it, by key."""
        return parse_qconf_object(self.run("qconf", *args))

    def names(self, option: str) -> list[str]:
        """Return a list of names (`-sel`, `-sql`, `-sconfl`), empty where qconf has none."""
        try:
            return self.run("qconf", option).split()
        except QconfError as fault:
            if "defined" in str(fault):  # "no config defined", "no host group list defined"
                return []
            raise

    def configuration(self, host: str) -> dict[str, str] | None:
        """Return a host's own configuration, None where it has none."""
        return self.show("-sconf", host) if host in self.names("-sconfl") else None

    def shared_configuration(self) -> dict[str, str]:
        """Return the global configuration."""
        return self.show("-sconf", "global")

    def complexes(self) -> dict[str, str]:
        """Return the line of each complex by name, one blank between its fields."""
        rows = [line.split() for line in join_continued_lines(self.run("qconf", "-sc"))]
        return {row[0]: " ".join(row) for row in rows if len(row) == COMPLEX_FIELDS}

    def queues_of_host(self, host: str) -> list[str]:
        """Return the queues that a host has."""
        try:
            instances = [word.split("@") for word in self.run("qselect").split() if "@" in word]
        except QconfError:  # without a word where there is no queue at all
            if self.names("-sql"):
                raise
            return []
        return [queue for queue, name in instances if name == host]

    def hosts_of_group(self, group: str) -> list[str]:
        """Return the hosts of a host group, none where there is no such group."""
        if group not in self.names("-shgrpl"):
            return []
        return self.run("qconf", "-shgrp_resolved", group).split()

    def load(self, option: str, name: str, text: str) -> None:
        """Have qconf read an object from a file of that name; raise QconfError."""
        with tempfile.TemporaryDirectory(prefix="gpulock-") as folder:
            path = Path(folder, name)
            path.write_text(text, errors="surrogateescape")
            self.run("qconf", option, str(path))


def join_continued_lines(text: str) -> list[str]:
    """Return the lines of a qconf output, those broken up with a backslash made whole."""
    whole = re.sub(r"[ \t]*\\\n[ \t]*", " ", text)
    return [line for line in whole.splitlines() if line.strip() and not line.startswith("#")]


def parse_qconf_object(text: str) -> dict[str, str]:
    """Return key and value of each line; blanks in a row are one, as Grid Engine keeps them."""
    pairs = [line.split(None, 1) for line in join_continued_lines(text)]
    return {pair[0]: " ".join(pair[1].split()) if len(pair) > 1 else "" for pair in pairs}


def is_sge_none(value: str | None) -> bool:
    """Say whether a value stands for nothing."""
    return value is None or value.lower() in ("", NONE)


def parse_host_overrides(value: str) -> tuple[str, dict[str, str]]:
    """Split `DEFAULT,[HOST=VALUE],[@GROUP=VALUE]`; raise QconfError for anything else."""
    default, found, rest = value.partition(",[")
    overrides: dict[str, str] = {}
    if not found:
        return value, overrides
    if not rest.endswith("]"):
        raise QconfError(f"not understood: {value[:120]}; set it by hand")
    for part in re.split(r"\],\s*\[", rest[:-1]):
        domain, equals, inner = part.partition("=")
        if not equals or "[" in inner or "]" in inner:
            raise QconfError(f"not understood: {value[:120]}; set it by hand")
        overrides[domain.strip()] = inner.strip()
    return default.strip(), overrides


def parse_sge_list(value: str) -> dict[str, str]:
    """Return the elements of `a=1,b=2(x y)`, empty for NONE."""
    if is_sge_none(value):
        return {}
    pairs = [item.partition("=") for item in split_sge_elements(value)]
    return {name: inner for name, _, inner in pairs if name}


def format_qconf_object(pairs: Mapping[str, str]) -> str:
    """Return an object as qconf reads it."""
    return "".join(f"{key} {value}\n" for key, value in pairs.items())
