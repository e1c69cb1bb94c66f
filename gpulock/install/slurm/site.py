# SPDX-License-Identifier: Apache-2.0
"""Where this node's Slurm is: its programs, its slurm.conf, the name it gives to this machine.

From the settings, else from the slurmd that runs here. The environment of the caller is not
used: it may lead to another cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.daemons import (
    check_trusted,
    find_scheduler_daemons,
    trusted_program_owners,
)
from gpulock.install.files import InstallError, run_program
from gpulock.install.slurm.slurm_conf import SlurmConf, parse_scontrol_config
from gpulock.node.settings import Settings

SLURMD: Final = "slurmd"
DEFAULT_CONF: Final = Path("/etc/slurm/slurm.conf")
FETCHED_CONF: Final = Path("/run/slurm/conf/slurm.conf")  # where slurmd puts a fetched one
OLDEST: Final = (22, 5)  # docs/slurm.md, releases that were tried
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_MESSAGE: Final = 600  # characters of one that is shown
_SECONDS: Final = 20.0  # as qmaster has: more than MessageTimeout, by which scontrol gives up
_GRES_SECONDS: Final = 40.0  # slurmd -G waits 19 s for a device file that is missing


@dataclass(frozen=True)
class Slurmd:
    """A slurmd of this machine: its program, and what it was started with (empty: defaults).

    `libraries` are the folders in which it looks for libraries first (LD_LIBRARY_PATH).
    """

    pid: int
    program: Path
    conf: str = ""
    node: str = ""
    libraries: str = ""


@dataclass(frozen=True)
class SlurmSite:
    """Slurm as this node reaches it: `conf` and `slurmd` are None where none is to be found."""

    binaries: Path
    conf: Path | None
    slurmd: Slurmd | None = None

    @property
    def named(self) -> str:
        """The name of this node that slurmd was given by -N."""
        return self.slurmd.node if self.slurmd else ""

    @property
    def node(self) -> str:
        """The name of this node."""
        return self.named or os.uname().nodename.partition(".")[0]

    @property
    def gres_conf(self) -> Path | None:
        """Where slurmd looks for gres.conf, whether there is one or not."""
        return None if self.conf is None else self.conf.with_name("gres.conf")

    def in_force(self) -> SlurmConf:
        """Return the configuration that slurmctld goes by; raise InstallError."""
        done = self.run_client([self.binaries / "scontrol", "show", "config"])
        if done.returncode != 0:
            raise InstallError(f"scontrol show config: {_what_it_said(done)}")
        return parse_scontrol_config(done.stdout)

    def gres(self) -> str:
        """Return slurmd's own list of GRES (`slurmd -G`, which prints it to stderr)."""
        words = ["-G", *(["-N", self.named] if self.named else [])]
        conf = ["-f", str(self.conf)] if self.conf else []
        own = self.slurmd.program if self.slurmd else None
        beside = with_sibling_folders([self.binaries])
        program = own or find_slurm_program(SLURMD, beside, "install slurmd")
        # Under another name (Debian's is slurmd-wlm) it takes itself for a client: an empty list.
        done = self.run_client([SLURMD, *words, *conf], _GRES_SECONDS, program)
        if done.returncode != 0:
            said = _what_it_said(done) or "no such node?"
            raise InstallError(f"{SLURMD} {' '.join(words)}: {said}")
        return done.stderr + done.stdout

    def run_client(
        self, command: list[str | Path], seconds: float = _SECONDS, program: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of Slurm's, with the libraries of slurmd; raise InstallError.

        In `/`: an entry of LD_LIBRARY_PATH may be relative.
        """
        libraries = self.slurmd.libraries if self.slurmd else ""
        env = {"PATH": _PATH, "SLURM_CONF": str(self.conf or ""), "LD_LIBRARY_PATH": libraries}
        env = {name: value for name, value in env.items() if value}
        return run_program(command, seconds, env, executable=program, cwd="/")


def _what_it_said(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a program said: from `fatal:` on, else its errors, else its last line."""
    said = done.stdout + done.stderr
    _, fatal, message = " ".join(said.split()).partition("fatal: ")
    errors = re.findall(r"(?m)^.*?\berror: (.*\S)", said)
    last = said.strip().rpartition("\n")[2].strip()
    return (f"{fatal}{message}" or "; ".join(errors) or last)[:_MESSAGE]


def find_slurm_site(settings: Settings) -> SlurmSite:
    """Return this node's Slurm: what the settings give, then what slurmd was started with.

    Raises InstallError where there is no Slurm, and for programs that others could have put where
    they are, unless the settings name their folder.
    """
    slurmd = find_own_slurmd(settings)
    conf = settings.slurm_conf or (slurmd.conf if slurmd else "")
    there = [path for path in (DEFAULT_CONF, FETCHED_CONF) if path.is_file()]
    path = Path(conf) if conf else next(iter(there), None)
    clients = [Path(settings.slurm_binaries)]
    is_named = "SLURM_BINARIES" in settings.given  # the hooks run what is there
    if slurmd and not is_named:
        clients = with_sibling_folders([slurmd.program.parent, *clients])
    scontrol = find_slurm_program("scontrol", clients, f"set SLURM_BINARIES in {settings.path}")
    for one in [slurmd.program, scontrol] if slurmd and not is_named else ():
        check_trusted(one, trusted_program_owners(), "SLURM_BINARIES")
    return SlurmSite(scontrol.parent, path, slurmd)


def release_fault(conf: SlurmConf) -> str:
    """Return why it is not known whether jobs of this release are locked, or nothing; pure."""
    release = conf.get("SLURM_VERSION")
    oldest = ".".join(f"{number:02}" for number in OLDEST)
    fault = f"this Slurm is {release}, and gpulock is known to work on {oldest} and newer"
    return "" if tuple(map(int, re.findall(r"\d+", release)[:2])) >= OLDEST else fault


def find_own_slurmd(settings: Settings) -> Slurmd | None:
    """Return the slurmd of the settings' slurm.conf, of any where they name none.

    Raises InstallError for several, which a machine has in developers' set-ups alone.
    """
    slurmds = {(one.node, one.conf): one for one in find_slurmds(settings)}
    if len(slurmds) > 1:
        named = ", ".join(sorted(" of ".join(filter(None, one)) for one in slurmds))
        raise InstallError(f"several slurmds run here ({named}); set SLURM_CONF to the file of one")
    return next(iter(slurmds.values()), None)


def with_sibling_folders(folders: list[Path]) -> list[Path]:
    """Return folders with those beside them: daemons are in sbin, clients in bin."""
    siblings = [folder.parent / name for folder in folders for name in (folder.name, "bin", "sbin")]
    return list(dict.fromkeys(siblings))


def find_slurm_program(name: str, folders: list[Path], do: str) -> Path:
    """Return a program of Slurm's; raise InstallError."""
    for folder in folders:
        if os.access(folder / name, os.X_OK) and (folder / name).is_file():
            return folder / name
    raise InstallError(f"no {name} in {' '.join(map(str, folders))}; {do}")


def find_slurmds(settings: Settings, proc: Path = Path("/proc")) -> list[Slurmd]:
    """Return the slurmds that go by the slurm.conf of the settings; all where it names none.

    That is of this machine, as far as it can be seen, and none of another container's.
    """
    slurmds: list[Slurmd] = []
    for daemon in find_scheduler_daemons(SLURMD, proc):
        conf, node = parse_slurmd_arguments(list(daemon.words), daemon.env.get("SLURM_CONF", ""))
        libraries = daemon.env.get("LD_LIBRARY_PATH", "")
        if not settings.slurm_conf or conf in ("", settings.slurm_conf):
            slurmds.append(Slurmd(daemon.pid, daemon.program, conf, node, libraries))
    return slurmds


def parse_slurmd_arguments(words: list[str], conf: str) -> tuple[str, str]:
    """Return slurmd's own slurm.conf and node name, empty for the defaults; pure.

    `conf` is the one that its environment names.
    """
    node = ""
    for number, word in enumerate(words[1:], 1):
        if word[:2] in ("-f", "-N") and not word.startswith("--"):
            value = word[2:] or (words[number + 1] if number + 1 < len(words) else "")
            conf, node = (value, node) if word[:2] == "-f" else (conf, value)
    return conf if conf.startswith("/") else "", node
