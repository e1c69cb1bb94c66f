# SPDX-License-Identifier: Apache-2.0
"""Where this node's Grid Engine is: from the settings, or from the execd that runs here.

The environment of the caller may lead to another cell: it counts where no execd runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpulock.daemon.core.sge_client import read_cell_ports
from gpulock.install.daemons import SchedulerDaemon, find_scheduler_daemons
from gpulock.install.files import InstallError
from gpulock.install.sge.programs import (
    find_sge_binaries,
    find_sge_shepherd,
    minimum_id_fault,
    read_sge_release,
    release_fault,
    try_sge_shepherd,
)
from gpulock.install.sge.qconf import Qconf, QconfError
from gpulock.node.settings import Settings


@dataclass(frozen=True)
class SgeSite:
    """What leads to qmaster, as the keys of the settings name it."""

    root: str
    cell: str
    binaries: str
    ports: Mapping[str, str] = field(default_factory=dict)  # where services(5) does not name them

    def keys(self) -> dict[str, str]:
        """Return the settings that lead a hook to the same qmaster; empty ones left out."""
        pairs = {
            "SGE_ROOT": self.root,
            "SGE_CELL": self.cell,
            "SGE_BINARIES": self.binaries,
        }
        return {name: value for name, value in pairs.items() if value}

    def is_master(self, host: str) -> bool:
        """Say whether qmaster runs on a host, given by Grid Engine's name of it."""
        try:
            name = Path(self.root, self.cell, "common/act_qmaster").read_text().strip().lower()
        except OSError:
            return False
        return name.partition(".")[0] == host.lower().partition(".")[0]

    def release(self) -> str:
        """Return the release of its clients, `SGE 8.1.9`; raise InstallError."""
        return read_sge_release(Path(self.binaries, "qstat"), self.root, self.cell)

    def qconf(self, seconds: float = 20.0) -> Qconf:
        """Return the clients of this site."""
        env = {"SGE_ROOT": self.root, "SGE_CELL": self.cell, **self.ports}
        return Qconf(Path(self.binaries), env, seconds)


def find_execds(proc: Path = Path("/proc")) -> list[SchedulerDaemon]:
    """Return every execd of this machine that can be seen: its folder is its spool directory."""
    return find_scheduler_daemons("sge_execd", proc)


def find_execd(execds: list[SchedulerDaemon], root: str, cell: str) -> SchedulerDaemon | None:
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


def find_own_execd(settings: Settings, given: frozenset[str]) -> SchedulerDaemon | None:
    """Return the execd of the settings' cell, of any where they name none; raise InstallError."""
    root = settings.sge_root if "SGE_ROOT" in given else ""
    cell = settings.sge_cell if "SGE_CELL" in given else ""
    return find_execd(find_execds(), root, cell)


def find_sge_site(
    settings: Settings, given: frozenset[str], execd: SchedulerDaemon | None
) -> SgeSite:
    """Return the site: settings that were `given`, then execd's; without execd the caller's.

    Raises InstallError where nothing names SGE_ROOT.
    """
    env = execd.env if execd else os.environ

    def pick(name: str, default: str = "") -> str:
        known = str(getattr(settings, name.lower())) if name in given else ""
        return known or env.get(name, "") or default

    root, cell = pick("SGE_ROOT"), pick("SGE_CELL", "default")
    if not root:
        raise InstallError("no execd runs here and SGE_ROOT is not known; start it, or set that")
    folder = settings.sge_binaries or find_sge_binaries(Path(root), execd)
    own = {name: env[name] for name in ("SGE_QMASTER_PORT", "SGE_EXECD_PORT") if env.get(name)}
    return SgeSite(root, cell, folder, {**read_cell_ports(root, cell), **own})


def tried_sge_shepherd(
    settings: Settings, site: SgeSite, execd: SchedulerDaemon | None, lines: Mapping[str, str]
) -> Path:
    """Return the shepherd that ours becomes; raise InstallError where no job of ours would start.

    `lines` are the host's configuration. A release that is not known is none of ours.
    """
    real = find_sge_shepherd(settings, Path(site.root), execd)
    clients = site.release()
    release = try_sge_shepherd(real, site.root, execd) or clients
    if why := release_fault(release) or release_fault(clients):
        raise InstallError(f"{why}: nothing was installed (docs/grid-engine.md)")
    if release != clients:
        raise InstallError(f"{real} is of {release}, the clients are of {clients}")
    if why := minimum_id_fault(release, lines):
        raise InstallError(f"{why}; set both to 0 (qconf -mconf)")
    return real


def choose_sge_host(hosts: Sequence[str], node: str, alias: str = "") -> str:
    """Return the one of `hosts` that a machine is, as it is written there; empty for none; pure.

    `node` is the kernel's name, which may lack the domain. `alias` is the name that Grid Engine's
    gethostname prints: host_aliases gives any name at all.
    """
    known = {host.lower(): host for host in hosts}
    short = node.lower().partition(".")[0]
    for name in (alias.lower(), node.lower(), short):
        if name in known:
            return known[name]
    same = [host for host in hosts if host.lower().partition(".")[0] == short]
    return same[0] if len(same) == 1 else ""


def sge_host_name(qconf: Qconf, name: str = "") -> str:
    """Return this machine's name as Grid Engine has it; raise InstallError when it has none."""
    hosts = qconf.names("-sel")
    node = os.uname().nodename.lower()
    if name:
        found = {host.lower(): host for host in hosts}.get(name.lower(), "")
    else:
        try:
            alias = qconf.run("gethostname", "-aname").strip()
        except QconfError:  # not every build has it
            alias = ""
        found = choose_sge_host(hosts, node, alias)
    if found:
        return found
    raise InstallError(f"{name or node} is no execution host ({' '.join(hosts)}); see qconf -ae")
