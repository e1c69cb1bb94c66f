# SPDX-License-Identifier: Apache-2.0
"""The files of systemd/, rendered for one installation: interpreter, settings, folders, devices.

Pure but for `templates`, and a look for a map of Slurm's. systemd reads `%`, quotes and blanks in
its own way: a path with any of them is refused, not escaped.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.hooks import InstallError, find_share_folder
from gpulock.node.settings import Settings
from gpulock.slurm.gres_map import NAME as SLURM_MAP
from gpulock.store.locks import claims_root

DAEMON: Final = "gpulockd.service"
EXPORTER: Final = "gpulock-exporter.service"
SOCKET: Final = "gpulock-exporter.socket"
UNITS: Final = (DAEMON, EXPORTER, SOCKET)
TMPFILES: Final = "tmpfiles.d/gpulock.conf"
SYSUSERS: Final = "sysusers.d/gpulock.conf"
LOGROTATE: Final = "gpulock.logrotate"
USER: Final = "gpulock-exporter"
PACKAGE_CARDS: Final = 16  # whose nodes a package's unit names; an older systemd needs that
_RUN: Final = "/run/"
_STATE_DIR: Final = "/var/lib/gpulock"  # as the example for logrotate has it
_TEMPORARY: Final = ("/tmp/", "/var/tmp/")  # what PrivateTmp= hides
_CONTROL: Final = 255  # minor number of /dev/nvidiactl (nv.h, NV_CONTROL_DEVICE_MINOR)
_HIGHEST_PORT: Final = 65535
_NO_COMMAND: Final = ("ProtectSystem=strict", "NoNewPrivileges=yes", "MemoryDenyWriteExecute=yes")
_ANY_COMMAND: Final = (
    "# IDLE_COMMAND is the site's: it may send mail by a setgid program, through a spool.",
    "ProtectSystem=full",
    "NoNewPrivileges=no",
    "MemoryDenyWriteExecute=no",
    "CapabilityBoundingSet=CAP_SETUID CAP_SETGID",
)
_TEST_COMMAND: Final = ("# HEALTH_COMMAND tests GPUs.", "DevicePolicy=auto", "TasksMax=4096")
_MPS: Final = (
    "# SHARE_MPS: what it starts runs as the user of a card, and outlives gpulockd.",
    "KillMode=process",
    "DevicePolicy=auto",
    "TasksMax=infinity",
    "MemoryDenyWriteExecute=no",
    "CapabilityBoundingSet=CAP_SETUID CAP_SETGID CAP_CHOWN CAP_FOWNER",
)
# The driver takes for root who has CAP_SYS_ADMIN (docs/facts/nvml.md). The numbers of NVSwitches
# and of /dev/nvidia-caps are known only once it is loaded, which may be after gpulockd starts.
_RESET: Final = (
    "# QUARANTINE_RESET: nvidia-smi opens the driver's devices, and the driver asks for root.",
    "DevicePolicy=auto",
    "CapabilityBoundingSet=CAP_SYS_ADMIN",
)
_CGROUP: Final = (
    "# ISOLATION=cgroup: it looks after what denies the devices, and clears it away.",
    "ProtectControlGroups=no",
    "CapabilityBoundingSet=CAP_SYS_ADMIN",
    "SystemCallFilter=bpf",
)
# A slurmd drops its groups even for -G (docs/facts/slurm.md, positions in slurmd's list).
_SLURM: Final = ("# slurmd -G, asked when the cards changed.", "CapabilityBoundingSet=CAP_SETGID")


@dataclass(frozen=True)
class UnitInputs:
    """What the units are rendered from; `minors` are the cards', as in /dev/nvidiaN."""

    python: str
    config: Path
    settings: Settings
    minors: tuple[int, ...] = (0,)
    was_isolated: bool = False  # by cgroup, in this boot: something may be left to clear away

    def values(self) -> dict[str, str]:
        """Return what each placeholder stands for; raise InstallError."""
        settings = self.settings
        return {
            "PYTHON": check_unit_path("interpreter", self.python),
            "CONFIG": check_unit_path("settings file", str(self.config)),
            "LOCK_DIR": check_unit_path("LOCK_DIR", settings.lock_dir),
            "STATE_DIR": check_unit_path("STATE_DIR", settings.state_dir),
            "WRITABLE": " ".join(writable_folders(settings)),
            "COMMAND": "\n".join(command_directives(settings)),
            "ISOLATION": "\n".join(isolation_directives(settings, self.was_isolated)),
            "MINORS": " ".join(f"-c {minor}" for minor in (_CONTROL, *self.minors)),
            "NODES": "\n".join(f"DeviceAllow=/dev/nvidia{minor} rw" for minor in self.minors),
            "FOLDER": "\n".join(exporter_folder_directives(settings.exporter_dir)),
            "PRIVATE_TMP": "no" if self._is_in_tmp() else "yes",
            "LISTEN": "\n".join(
                f"ListenStream={listen_stream(word)}" for word in settings.exporter_listen
            ),
        }

    def _is_in_tmp(self) -> bool:
        """Say whether the exporter reads anything that PrivateTmp= would hide."""
        s = self.settings
        read = (s.lock_dir, s.state_dir, s.exporter_dir, s.driver_root, s.sys_root, s.web_config)
        more = (s.mps_dir, str(self.config), self.python)
        return any(path.startswith(_TEMPORARY) for path in (*read, *more))


def read_unit_templates() -> dict[str, str]:
    """Return the text of every file by its path below systemd/; raise InstallError."""
    root = find_share_folder() / "systemd"
    try:
        return {name: (root / name).read_text() for name in (*UNITS, TMPFILES, SYSUSERS, LOGROTATE)}
    except OSError as fault:
        raise InstallError(f"{fault}; install gpulock again") from fault


def render_units(installation: UnitInputs) -> dict[str, str]:
    """Return every file as it is installed; raise InstallError."""
    values = installation.values()
    files = {name: fill_placeholders(text, values) for name, text in read_unit_templates().items()}
    files[LOGROTATE] = files[LOGROTATE].replace(_STATE_DIR, values["STATE_DIR"])
    folder = installation.settings.exporter_dir
    if not folder.startswith(_RUN):
        files[TMPFILES] += f"d {check_unit_path('EXPORTER_DIR', folder)} 0755 {USER} {USER} -\n"
    if installation.settings.share_mps:  # gpulockd itself may write to it, not beside it
        folder = check_unit_path("MPS_DIR", installation.settings.mps_dir)
        files[TMPFILES] += f"d {folder} 0755 root root -\n"
    return files


def fill_placeholders(text: str, values: dict[str, str]) -> str:
    """Return a template with its placeholders replaced; one that is not known is a KeyError."""
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], text)


def check_unit_path(what: str, path: str) -> str:
    """Return a path that systemd takes as it is written; raise InstallError for any other."""
    if not path.startswith("/") or not re.fullmatch(r"[\w/.+=:@,-]+", path, re.ASCII):
        raise InstallError(f"{what} {path!r} cannot stand in a unit; move it to a plain path")
    return path


def writable_folders(settings: Settings) -> list[str]:
    """Return the folders that gpulockd writes to.

    The one above LOCK_DIR and the records, not these: when they were lost and made again, systemd's
    mount of the old ones would leave the new ones read-only. A `-` marks what need not exist.
    """
    lock_dir = settings.lock_dir.rstrip("/")
    above = os.path.dirname(lock_dir)
    locks = [lock_dir, claims_root(lock_dir)] if above in ("", "/") else [above]
    needed = [*locks, settings.state_dir]
    others = [
        settings.exporter_dir,
        settings.job_map_dir,
        settings.gpustat_dir,
        settings.report_dir,
        settings.cdi_dir.replace("/var/run/", _RUN, 1),
        settings.mps_dir if settings.share_mps else "",
    ]
    found: list[str] = []
    for path in (*needed, *filter(None, others)):
        check_unit_path("folder", path)
        if not any(f"{path}/".startswith(f"{known.lstrip('-')}/") for known in found):
            found.append(path if path in needed else f"-{path}")
    return found


def setting_directives(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return by setting what it needs of gpulockd's unit; nothing where it is not set."""
    has_map = Path(settings.state_dir, SLURM_MAP).exists()
    return {
        "IDLE_COMMAND": _ANY_COMMAND if settings.idle_command else (),
        "HEALTH_COMMAND": (*_ANY_COMMAND, *_TEST_COMMAND) if settings.health_command else (),
        "SHARE_MPS": _MPS if settings.share_mps else (),
        "QUARANTINE_RESET": _RESET if settings.quarantine_reset else (),
        SLURM_MAP: _SLURM if has_map else (),
        "ISOLATION": _CGROUP if settings.isolation != "off" else (),
    }


def command_directives(settings: Settings) -> list[str]:
    """Return what the programs need that gpulockd starts, each line once."""
    needs = setting_directives(settings)
    needs.pop("ISOLATION")
    found = [line for lines in needs.values() for line in lines]
    strict = () if "ProtectSystem=full" in found else _NO_COMMAND
    return [*dict.fromkeys([*strict, *found])]


def isolation_directives(settings: Settings, was_isolated: bool) -> list[str]:
    """Return what gpulockd may do to other programs' cgroups."""
    isolated = was_isolated or settings.isolation != "off"
    return [*_CGROUP] if isolated else ["ProtectControlGroups=yes"]


def exporter_folder_directives(path: str) -> list[str]:
    """Return how the exporter comes to its folder: systemd makes those below /run."""
    check_unit_path("EXPORTER_DIR", path)
    if not path.startswith(_RUN):
        return [f"ReadWritePaths={path}"]
    return [f"RuntimeDirectory={path.removeprefix(_RUN)}", "RuntimeDirectoryPreserve=yes"]


def listen_stream(word: str) -> str:
    """Return a word of EXPORTER_LISTEN as ListenStream= wants it; raise InstallError."""
    host, colon, port = word.rpartition(":")
    try:
        if not (colon and port.isascii() and port.isdigit() and 0 < int(port) <= _HIGHEST_PORT):
            raise ValueError
        if not host:
            return port
        bracketed = host.startswith("[") and host.endswith("]")
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
        if bracketed != (address.version == 6):  # noqa: PLR2004 (IPv6)
            raise ValueError
    except ValueError:
        raise InstallError(
            f"EXPORTER_LISTEN={word}: systemd listens on :PORT, ADDRESS:PORT or [IPv6]:PORT,"
            " not on a name; give the address"
        ) from None
    return word


def card_minors(seen: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the cards' minors: those seen, else as many as the settings say there are."""
    return tuple(sorted(minor for minor in seen if minor >= 0)) or tuple(range(max(count, 1)))
