# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's programs on this node: where they are, whose word they are, and which release.

Nothing is taken from a distribution's folder: they stand beside the execd that runs, or below
SGE_ROOT/bin/ARCH. One that is put in force is run first, and its release is a known one.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.files import InstallError, run_program
from gpulock.node.settings import Settings

_ELF: Final = b"\x7fELF"
_SHEPHERD: Final = "sge_shepherd"
_SECONDS: Final = 10.0
CLIENTS: Final = ("qconf", "qstat", "qselect", "gethostname", "qmod", "qalter")
# The first line of `-help`, of what gpulock was run on (docs/grid-engine.md, which Grid Engine).
KNOWN: Final = {
    "Son of Grid Engine 8.1.9": r"SGE 8\.1\.9",
    "Some Grid Engine": r"SGE r\d*\.[\w.-]*",  # of an archive without git it is `r.`
    "Open Cluster Scheduler 9.0 to 9.2": r"OCS 9\.[012](\.\w+)*",
}


OCS: Final = "OCS "
# Open Cluster Scheduler says nothing without them, and asks nobody for its help.
_PORTS: Final = {"SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}


def release_fault(release: str) -> str:
    """Return why jobs of a release are not understood, or nothing; pure."""
    if any(re.fullmatch(pattern, release) for pattern in KNOWN.values()):
        return ""
    return f"this Grid Engine is {release}, and gpulock knows {', '.join(KNOWN)}"


def minimum_id_fault(release: str, lines: Mapping[str, str]) -> str:
    """Return why no hook of root's starts by a host's configuration, or nothing; pure.

    The shepherd of Open Cluster Scheduler holds hooks to min_uid and min_gid as it holds jobs, and
    puts the queue in error (docs/facts/grid-engine.md, user, directory and output of hooks).
    """
    high = [
        f"{name}={lines[name]}" for name in ("min_uid", "min_gid") if lines.get(name, "0") != "0"
    ]
    if not (high and release.startswith(OCS)):
        return ""
    return f"{' '.join(high)}: the shepherd of {release} starts no hook as root then"


def read_sge_release(program: Path, root: str, cell: str = "default") -> str:
    """Run a program for its release, `SGE 8.1.9`; raise InstallError where it cannot be run."""
    env = {"PATH": "/usr/bin:/bin", "SGE_ROOT": root, "SGE_CELL": cell, **_PORTS}
    try:
        done = run_program([program, "-help"], _SECONDS, env, cwd="/")
    except (OSError, subprocess.SubprocessError) as fault:
        raise InstallError(f"{program} cannot be run: {fault}") from fault
    said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
    line = "".join(c if c.isprintable() else "?" for c in said[:80])
    if done.returncode != 0:
        raise InstallError(f"{program} cannot be run, it ends with {done.returncode}: {line}")
    return line


def find_sge_binaries(root: Path, execd: SchedulerDaemon | None) -> str:
    """Return the folder of the real clients: Debian's in the PATH are wrapper scripts.

    Beside the execd that runs, or below an SGE_ROOT that may be its word: only what nobody but
    root and the admin user could have put there. Without execd the root is the administrator's
    own word. Raises InstallError.
    """
    for folder in program_folders(root, execd):
        if all(_is_program(folder / name) for name in ("qconf", "qstat")):
            if execd and (why := why_untrusted_clients(folder, execd.owners)):
                raise InstallError(
                    f"the clients in {folder} are not run: {why}; fix it, or set SGE_BINARIES"
                )
            return str(folder)
    raise InstallError(f"no qconf and qstat below {root}/bin; set SGE_BINARIES")


def why_untrusted_clients(folder: Path, owners: Collection[int]) -> str:
    """Return why the clients in a folder are not run, or nothing."""
    there = [folder / name for name in CLIENTS if (folder / name).exists()]
    return next((why for path in there if (why := why_untrusted_program(path, owners))), "")


def find_sge_shepherd(settings: Settings, root: Path, execd: SchedulerDaemon | None) -> Path:
    """Return the shepherd that execd would start, or SGE_SHEPHERD; raise InstallError."""
    if settings.sge_shepherd:
        found = Path(settings.sge_shepherd)
        if not is_executable_file(found):
            raise InstallError(f"SGE_SHEPHERD={found} is no program: no job would start")
        return found
    given = [Path(settings.sge_binaries)] if settings.sge_binaries else []
    for folder in (*program_folders(root, execd), *given):
        if is_executable_file(folder / _SHEPHERD):
            return folder / _SHEPHERD
    raise InstallError(f"no {_SHEPHERD} beside execd or below {root}/bin: set SGE_SHEPHERD")


def try_sge_shepherd(program: Path, root: str, execd: SchedulerDaemon | None) -> str:
    """Return the release of a real shepherd; raise InstallError where it cannot or may not be run.

    A program of the site's own that starts it is not run: nobody knows what it does. Its release
    is empty.
    """
    if program.name != _SHEPHERD:
        return ""
    if execd and (why := why_untrusted_program(program, execd.owners)):
        raise InstallError(f"{program} is not run: {why}; fix it, or set SGE_SHEPHERD")
    return read_sge_release(program, root)


def program_folders(root: Path, execd: SchedulerDaemon | None) -> Iterator[Path]:
    """Yield where programs may stand, most likely first."""
    if execd:
        yield execd.program.parent
    for folder in sorted((root / "bin").glob("*")):
        yield folder.resolve()


def is_executable_file(path: Path) -> bool:
    """Say whether a path leads to a file that may be executed."""
    return path.is_file() and os.access(path, os.X_OK)


def _is_program(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == _ELF
    except OSError:
        return False
