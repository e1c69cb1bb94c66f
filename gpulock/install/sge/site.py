# SPDX-License-Identifier: Apache-2.0
"""Where this node's Grid Engine is: its cell, its programs and their release, this host's name.

From the settings, or from the execd that runs here, on the master from qmaster; the environment of
the caller may lead to another cell. Programs stand beside the daemon, or where SGE_BINARIES says;
none that others could have put there is run, and none of a release that is not known is put in
force.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpulock.daemon.core.sge_client import read_cell_ports
from gpulock.install.daemons import SchedulerDaemon, check_trusted, find_scheduler_daemons
from gpulock.install.files import InstallError
from gpulock.install.sge.qconf import PORTS, Qconf
from gpulock.node.settings import Settings

_SHEPHERD: Final = "sge_shepherd"
CLIENTS: Final = ("qconf", "qstat", "qselect", "qmod")
# The first line of `-help`, of what gpulock was run on (docs/grid-engine.md, which Grid Engine).
KNOWN: Final = {
    "Son of Grid Engine 8.1.9": r"SGE 8\.1\.9",
    "Some Grid Engine": r"SGE r\d*\.[\w.-]*",  # of an archive without git it is `r.`
    "Open Cluster Scheduler 9.0 to 9.2": r"OCS 9\.[012](\.\w+)*",
}
OCS: Final = "OCS "


def find_execds(proc: Path = Path("/proc")) -> list[SchedulerDaemon]:
    """Return every execd of this machine that can be seen: its folder is its spool directory."""
    return find_scheduler_daemons("sge_execd", proc)


def find_own_execd(settings: Settings) -> SchedulerDaemon | None:
    """Return the execd of the settings' cell, of any where they name none.

    Raises InstallError for several.
    """
    root, cell = settings.given.get("SGE_ROOT", ""), settings.given.get("SGE_CELL", "")
    fitting = [
        execd
        for execd in find_execds()
        if root in ("", execd.env.get("SGE_ROOT", ""))
        and cell in ("", execd.env.get("SGE_CELL", "default"))
    ]
    if len(fitting) > 1:
        cells = " ".join(f"{e.env.get('SGE_ROOT')}/{e.env.get('SGE_CELL')}" for e in fitting)
        raise InstallError(f"several execds run here ({cells}); name one by SGE_ROOT and SGE_CELL")
    return fitting[0] if fitting else None


def find_qmaster(settings: Settings, execd: SchedulerDaemon | None) -> Qconf:
    """Return the clients: of the cell that the settings give, then execd's, then qmaster's.

    Raises InstallError where nothing names SGE_ROOT.
    """
    daemon = execd or next(iter(find_scheduler_daemons("sge_qmaster")), None)
    env = daemon.env if daemon else {}
    root, cell = [settings.given.get(name) or env.get(name) for name in ("SGE_ROOT", "SGE_CELL")]
    if not root:
        raise InstallError(
            "neither execd nor qmaster runs here, and SGE_ROOT is not known: start it, or set"
            " SGE_ROOT, SGE_CELL and SGE_BINARIES"
        )
    folder = settings.sge_binaries or find_sge_binaries(daemon)
    own = {name: env[name] for name in PORTS if env.get(name)}
    cell = cell or "default"
    return Qconf(root, cell, folder, {**read_cell_ports(root, cell), **own})


def find_sge_binaries(daemon: SchedulerDaemon | None) -> str:
    """Return the folder of the clients, beside a daemon; raise InstallError.

    Only what nobody but root and the admin user could have put there. Debian's in the PATH are
    wrapper scripts.
    """
    folder = daemon.program.parent if daemon else Path("/")
    if not daemon or not (folder / "qconf").exists():
        raise InstallError("no qconf beside Grid Engine's daemon; set SGE_BINARIES")
    for path in [folder / name for name in CLIENTS if (folder / name).exists()]:
        check_trusted(path, daemon.owners, "SGE_BINARIES")
    return str(folder)


def find_sge_shepherd(
    settings: Settings, qconf: Qconf, execd: SchedulerDaemon, lines: Mapping[str, str]
) -> Path:
    """Return the shepherd that ours becomes, tried; raise InstallError where no job would start.

    `lines` are the host's configuration. A release that is not known is none of ours. A program of
    the site's own that starts the shepherd is not run: nobody knows what it does.
    """
    given = settings.sge_shepherd
    real = Path(given) if given else execd.program.with_name(_SHEPHERD)
    if not (real.is_file() and os.access(real, os.X_OK)):
        where = f"SGE_SHEPHERD={given} is no program" if given else f"no {real}, set SGE_SHEPHERD"
        raise InstallError(f"{where}: no job would start")
    release = clients = qconf.release()
    if real.name == _SHEPHERD:
        check_trusted(real, execd.owners, "SGE_SHEPHERD")
        release = qconf.release(real)
    check_release(release)
    if release != clients:
        raise InstallError(f"{real} is of {release}, the clients are of {clients}")
    # The shepherd of Open Cluster Scheduler holds hooks to both as it holds jobs, and puts the
    # queue in error (docs/facts/grid-engine.md, user, directory and output of hooks).
    high = [f"{key}={lines[key]}" for key in ("min_uid", "min_gid") if lines.get(key, "0") != "0"]
    if high and release.startswith(OCS):
        raise InstallError(
            f"{' '.join(high)}: the shepherd of {release} starts no hook as root then; set both to"
            " 0 (qconf -mconf)"
        )
    return real


def check_release(release: str) -> None:
    """Raise InstallError for a release whose jobs are not understood; pure."""
    if not any(re.fullmatch(pattern, release) for pattern in KNOWN.values()):
        raise InstallError(
            f"this Grid Engine is {release}, and gpulock knows {', '.join(KNOWN)}"
            " (docs/grid-engine.md)"
        )


def choose_sge_host(hosts: Sequence[str], *names: str) -> str:
    """Return the one of `hosts` that has one of the names, with a domain or without; pure.

    Empty for none, and for several.
    """
    for name in map(str.lower, filter(None, names)):
        short = name.partition(".")[0]
        same = [host for host in hosts if host.lower().partition(".")[0] == short]
        same = [host for host in same if host.lower() == name] or same
        if len(same) == 1:
            return same[0]
    return ""


def sge_host_name(qconf: Qconf, execd: SchedulerDaemon | None) -> str:
    """Return this machine's name as Grid Engine has it; raise InstallError for none.

    execd's spool directory is called so: host_aliases gives any name at all.
    """
    hosts, node = qconf.names("-sel"), os.uname().nodename
    if name := choose_sge_host(hosts, execd.folder.name if execd else "", node):
        return name
    known = " ".join(hosts)
    raise InstallError(f"{node} is no execution host ({known}); start execd, or see qconf -ae")
