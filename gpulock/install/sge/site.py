# SPDX-License-Identifier: Apache-2.0
"""Where this node's Grid Engine is: from the settings, or from the execd that runs here.

The environment of the caller is not used: it may lead to another cell than this node's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from gpulock.install.daemons import (
    find_scheduler_daemons,
    trusted_program_owners,
)
from gpulock.install.hooks import InstallError
from gpulock.install.sge.programs import find_sge_binaries, read_sge_release
from gpulock.install.sge.qconf import Qconf, QconfError
from gpulock.node.settings import Settings

_NAME = "sge_execd"


@dataclass(frozen=True)
class Execd:
    """The execd of this node: what it was started with, and its spool directory."""

    pid: int
    env: dict[str, str]
    program: Path
    spool: Path
    owners: frozenset[int] = field(
        default_factory=trusted_program_owners
    )  # whose programs beside it are run


@dataclass(frozen=True)
class SgeSite:
    """What leads to qmaster, as the keys of the settings name it."""

    root: str
    cell: str
    qmaster_port: str
    execd_port: str
    binaries: str

    def keys(self) -> dict[str, str]:
        """Return the settings that lead a hook to the same qmaster; empty ones left out."""
        pairs = {
            "SGE_ROOT": self.root,
            "SGE_CELL": self.cell,
            "SGE_QMASTER_PORT": self.qmaster_port,
            "SGE_EXECD_PORT": self.execd_port,
            "SGE_BINARIES": self.binaries,
        }
        return {name: value for name, value in pairs.items() if value}

    def release(self) -> str:
        """Return the release of its clients, `SGE 8.1.9`; raise InstallError."""
        return read_sge_release(Path(self.binaries, "qstat"), self.root, self.cell)

    def qconf(self, seconds: float = 20.0) -> Qconf:
        """Return the clients of this site."""
        env = {name: value for name, value in self.keys().items() if name != "SGE_BINARIES"}
        return Qconf(Path(self.binaries), env, seconds)


def find_execds(proc: Path = Path("/proc")) -> list[Execd]:
    """Return every execd of this machine that can be seen, none of another container's."""
    return [
        Execd(daemon.pid, daemon.env, daemon.program, daemon.folder, daemon.owners)
        for daemon in find_scheduler_daemons(_NAME, proc)
    ]


def find_execd(execds: list[Execd], root: str, cell: str) -> Execd | None:
    """Return the one execd of a cell (empty: of any); raise InstallError for several."""
    fitting = [
        e
        for e in execds
        if root in ("", e.env.get("SGE_ROOT", ""))
        and cell in ("", e.env.get("SGE_CELL", "default"))
    ]
    if len(fitting) > 1:
        cells = " ".join(f"{e.env.get('SGE_ROOT')}/{e.env.get('SGE_CELL')}" for e in fitting)
        raise InstallError(f"several execds run here ({cells}); name one by SGE_ROOT and SGE_CELL")
    return fitting[0] if fitting else None


def find_sge_site(
    settings: Settings, given: frozenset[str], execd: Execd | None, root: str = "", cell: str = ""
) -> SgeSite:
    """Return the site: settings that were `given`, then what was asked for, then execd's.

    Raises InstallError where nothing names SGE_ROOT, or two disagree.
    """
    env = execd.env if execd else {}
    chosen = {"SGE_ROOT": root, "SGE_CELL": cell}
    for name, value in chosen.items():
        known = str(getattr(settings, name.lower())) if name in given else ""
        if value and known and value != known:
            raise InstallError(f"{settings.path} says {name}={known}, not {value}; change it there")

    def pick(name: str, default: str = "") -> str:
        known = str(getattr(settings, name.lower())) if name in given else ""
        return known or chosen.get(name, "") or env.get(name, "") or default

    root = pick("SGE_ROOT")
    if not root:
        raise InstallError("no execd runs here and SGE_ROOT is not known; start it or name them")
    folder = settings.sge_binaries or find_sge_binaries(Path(root), execd)
    ports = pick("SGE_QMASTER_PORT"), pick("SGE_EXECD_PORT")
    return SgeSite(root, pick("SGE_CELL", "default"), *ports, folder)


def sge_host_name(qconf: Qconf, name: str = "") -> str:
    """Return this machine's name as Grid Engine has it; raise InstallError when it has none."""
    hosts = qconf.names("-sel")
    known = {host.lower(): host for host in hosts}
    node = os.uname().nodename.lower()
    try:
        alias = qconf.run("gethostname", "-aname").strip().lower()
    except QconfError:  # not every build has it
        alias = node
    for candidate in [name.lower()] if name else [alias, node, node.partition(".")[0]]:
        if candidate in known:
            return known[candidate]
    short = [h for h in hosts if h.partition(".")[0].lower() == node.partition(".")[0]]
    if not name and len(short) == 1:
        return short[0]
    raise InstallError(f"{name or node} is no execution host ({' '.join(hosts)}); see qconf -ae")
