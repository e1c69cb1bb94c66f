# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's configuration: qconf as a program with a deadline, and what it prints, parsed.

The parsers are pure. We ask for whole lines (SGE_SINGLE_LINE), which each release that gpulock
knows gives.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpulock.daemon.slots.rsmap import split_sge_elements
from gpulock.install.files import InstallError, run_program

COMPLEX_FIELDS: Final = 8  # name shortcut type relop requestable consumable default urgency
_HELP_SECONDS: Final = 10.0
# Open Cluster Scheduler says nothing without them, and asks nobody for its help.
PORTS: Final = {"SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}


class Qconf:
    """Grid Engine's clients in one folder, with what leads to a cell's qmaster.

    `ports` are those which services(5) does not name.
    """

    def __init__(
        self,
        root: str,
        cell: str,
        binaries: str,
        ports: Mapping[str, str] | None = None,
        seconds: float = 20.0,
    ) -> None:
        self.root, self.cell, self.binaries, self.seconds = root, cell, binaries, seconds
        env = {"PATH": "/usr/bin:/bin", "SGE_SINGLE_LINE": "1", "SGE_ROOT": root, "SGE_CELL": cell}
        self.env = {**env, **(ports or {})}

    def keys(self) -> dict[str, str]:
        """Return the settings that lead a hook to the same qmaster; empty ones left out."""
        pairs = {"SGE_ROOT": self.root, "SGE_CELL": self.cell, "SGE_BINARIES": self.binaries}
        return {name: value for name, value in pairs.items() if value}

    def common(self, name: str) -> Path:
        """Return a file of the cell's own folder."""
        return Path(self.root, self.cell, "common", name)

    def release(self, program: str | Path = "qstat") -> str:
        """Return the release of its clients, `SGE 8.1.9`, or a program's; raise InstallError."""
        path = Path(self.binaries, program)
        done = run_program([path, "-help"], _HELP_SECONDS, {**PORTS, **self.env}, cwd="/")
        said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
        line = "".join(c if c.isprintable() else "?" for c in said[:80])
        if done.returncode != 0:
            raise InstallError(f"{path} cannot be run, it ends with {done.returncode}: {line}")
        return line

    def run(self, program: str, *args: str) -> str:
        """Return what a client prints; raise InstallError when it fails or hangs."""
        command: list[str | Path] = [Path(self.binaries, program), *args]
        do = "is qmaster up? else set SGE_BINARIES"
        done = run_program(command, self.seconds, self.env, do, errors="surrogateescape")
        if done.returncode != 0:
            said = (done.stderr + done.stdout).strip().replace("\n", " ")[:300]
            raise InstallError(f"{program} {' '.join(args)[:100]} failed: {said or 'no message'}")
        return done.stdout

    def show(self, *args: str) -> dict[str, str]:
        """Return an object as qconf shows it, by key."""
        return parse_qconf_object(self.run("qconf", *args))

    def names(self, option: str) -> list[str]:
        """Return a list of names (`-sel`, `-sql`, `-sconfl`), empty where qconf has none."""
        try:
            return self.run("qconf", option).split()
        except InstallError as fault:
            if "defined" in str(fault):  # "no config defined", "no host group list defined"
                return []
            raise

    def shared_configuration(self) -> dict[str, str]:
        """Return the global configuration."""
        return self.show("-sconf", "global")

    def complexes(self) -> dict[str, str]:
        """Return the line of each complex by name, one blank between its fields."""
        rows = [line.split() for line in self.run("qconf", "-sc").splitlines() if line[:1] != "#"]
        return {row[0]: " ".join(row) for row in rows if len(row) == COMPLEX_FIELDS}

    def hosts_of_group(self, group: str) -> list[str]:
        """Return the hosts of a host group, none where there is no such group."""
        if group not in self.names("-shgrpl"):
            return []
        return self.run("qconf", "-shgrp_resolved", group).split()

    def hook_values(self, queue: str, hook: str) -> tuple[str, dict[str, str]]:
        """Return a queue's own value of a hook, and those of its domains; raise InstallError."""
        return parse_host_overrides(self.show("-sq", queue)[hook])

    def load(self, option: str, name: str, text: str) -> None:
        """Have qconf read an object from a file of that name; raise InstallError."""
        with tempfile.TemporaryDirectory(prefix="gpulock-") as folder:
            path = Path(folder, name)
            path.write_text(text, errors="surrogateescape")
            self.run("qconf", option, str(path))


def parse_qconf_object(text: str) -> dict[str, str]:
    """Return key and value of each line; blanks in a row are one, as Grid Engine keeps them."""
    words = [line.split() for line in text.splitlines() if line.strip() and line[:1] != "#"]
    return {key: " ".join(value) for key, *value in words}


def format_qconf_object(pairs: Mapping[str, str]) -> str:
    """Return an object as qconf reads it."""
    return "".join(f"{key} {value}\n" for key, value in pairs.items())


def sge_value(value: str | None) -> str:
    """Return a value, empty for `none`: NONE in queues and hosts, none in configurations."""
    return "" if value is None or value.lower() == "none" else value


def parse_host_overrides(value: str) -> tuple[str, dict[str, str]]:
    """Split `DEFAULT,[HOST=VALUE],[@GROUP=VALUE]`; raise InstallError for anything else."""
    default, separator, rest = value.partition(",[")
    overrides: dict[str, str] = {}
    if not separator:
        return value, overrides
    parts = [part.partition("=") for part in re.split(r"\],\s*\[", rest[:-1])]
    for domain, equals, inner in parts:
        if not rest.endswith("]") or not equals or "[" in inner or "]" in inner:
            raise InstallError(f"not understood: {value[:120]}; set it by hand")
        overrides[domain.strip()] = inner.strip()
    return default.strip(), overrides


def parse_sge_list(value: str) -> dict[str, str]:
    """Return the elements of `a=1,b=2(x y)`, empty for NONE."""
    pairs = [item.partition("=") for item in split_sge_elements(sge_value(value))]
    return {name: inner for name, _, inner in pairs if name}
