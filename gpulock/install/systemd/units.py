# SPDX-License-Identifier: Apache-2.0
"""The files of systemd/, the same on every node, and the drop-ins by which settings change units.

systemd reads `%`, quotes and blanks in its own way: a path with any of them is refused, not
escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpulock.daemon.core.own_program import module_command
from gpulock.install.files import InstallError, find_share_folder
from gpulock.install.setting_faults import HIGHEST_PORT
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH

DAEMON: Final = "gpulockd.service"
EXPORTER: Final = "gpulock-exporter.service"
SOCKET: Final = "gpulock-exporter.socket"
UNITS: Final = (SOCKET, EXPORTER, DAEMON)  # as they are started
JOURNAL: Final = f"journalctl -u {EXPORTER} -u {DAEMON}"
TMPFILES: Final = "tmpfiles.d/gpulock.conf"
SYSUSERS: Final = "sysusers.d/gpulock.conf"
STATIC_FILES: Final = (SYSUSERS, TMPFILES, *UNITS)
USER: Final = "gpulock-exporter"
_UNIT_WRITES: Final = ("/run/", "/var/lib/gpulock/")  # ReadWritePaths= of gpulockd's unit
_UNIT_LISTENS: Final = ["ListenStream=9465"]
_PROGRAMS: Final = (  # what both units start: of a package, else by a module
    (("/usr/sbin/gpulockd",), "gpulock.daemon.app"),
    (("/usr/bin/gpulock-exporter",), "gpulock_exporter.app.program"),
)
_MAKE: Final = "ExecStartPre=+/usr/bin/install -d -m 0755"
_LISTEN: Final = re.compile(r"([0-9.]+|\[[0-9A-Fa-f:.]+\]|):([0-9]{1,5})", re.ASCII)
_ANY_COMMAND: Final = (
    "# IDLE_COMMAND is the site's: it may send mail by a setgid program, through a spool.",
    "ProtectSystem=full",
    "NoNewPrivileges=no",
    "MemoryDenyWriteExecute=no",
    "CapabilityBoundingSet=CAP_SETUID",
)
_ANY_DEVICE: Final = ("DevicePolicy=auto", "DeviceAllow=")  # with the unit's, auto were closed
_TEST_COMMAND: Final = ("# HEALTH_COMMAND tests GPUs.", *_ANY_DEVICE, "TasksMax=4096")
_MPS: Final = (
    "# SHARE_MPS: pipes and logs of an MPS are its user's; systemd starts it.",
    "CapabilityBoundingSet=CAP_CHOWN",
)
_CGROUP: Final = (
    "# ISOLATION=cgroup: it looks after what denies the devices, and clears it away.",
    "ProtectControlGroups=no",
    "CapabilityBoundingSet=CAP_SYS_ADMIN",
    "SystemCallFilter=bpf",
)


def read_static_files() -> dict[str, str]:
    """Return the text of every file by its path below systemd/; raise InstallError."""
    root = find_share_folder() / "systemd"
    try:
        return {name: (root / name).read_text() for name in STATIC_FILES}
    except OSError as fault:
        raise InstallError(f"{fault}; install gpulock again") from fault


def drop_in_texts(
    is_package: bool, config: Path, settings: Settings, was_isolated: bool = False
) -> dict[str, str]:
    """Return the drop-in of each unit, empty where it needs none; raise InstallError.

    What systemd would read otherwise is refused.
    `was_isolated`: by cgroup, in this boot, so that something may be left to clear away.
    """
    daemon, exporter = [
        start_directives(program if is_package else module_command(module), config)
        for program, module in _PROGRAMS
    ]
    if settings.share_mps:  # it may write to the folder itself, not beside it
        daemon.append(f"{_MAKE} {check_unit_path('STATE_DIR', settings.mps_dir)}")
    if folders := writable_folders(settings):
        daemon.append(f"ReadWritePaths={' '.join(folders)}")
    daemon += setting_directives(settings, was_isolated)
    sections = {
        DAEMON: ("[Service]", [*dict.fromkeys(daemon)]),
        EXPORTER: ("[Service]", exporter),
        SOCKET: ("[Socket]", listen_directives(settings)),
    }
    head = f"# Of gpulock install systemd, by {config}.\n# Changes of your own: systemctl edit"
    return {
        unit: "\n".join([f"{head} {unit}", section, *lines, ""]) if lines else ""
        for unit, (section, lines) in sections.items()
    }


def start_directives(command: Sequence[str], config: Path) -> list[str]:
    """Return how a program is started, nothing where the unit has it so already."""
    words = [check_unit_path("path", word) if "/" in word else word for word in command]
    if len(command) == 1 and str(config) == DEFAULT_PATH:
        return []
    line = " ".join([*words, "--config", check_unit_path("settings file", str(config))])
    return ["ExecStart=", f"ExecStart={line}"]


def check_unit_path(what: str, path: str) -> str:
    """Return a path that systemd takes as it is written; raise InstallError for any other."""
    if not path.startswith("/") or not re.fullmatch(r"[\w/.+=:@,-]+", path, re.ASCII):
        raise InstallError(f"{what} {path!r} cannot stand in a unit; move it to a plain path")
    return path


def writable_folders(settings: Settings) -> list[str]:
    """Return the folders that gpulockd writes to beside those of its unit; raise InstallError.

    A `-` marks what need not exist.
    """
    cdi = settings.cdi_dir.replace("/var/run/", "/run/", 1)
    folders = [check_unit_path("CDI_DIR", cdi)] if cdi else []
    folders += [settings.mps_dir] if settings.share_mps else []
    return [f"-{path}" for path in folders if not f"{path}/".startswith(_UNIT_WRITES)]


def setting_directives(settings: Settings, was_isolated: bool) -> list[str]:
    """Return what the settings need of gpulockd's unit."""
    isolates = was_isolated or settings.isolation != "off"
    needs = (
        (settings.idle_command or settings.health_command, _ANY_COMMAND),
        (settings.health_command, _TEST_COMMAND),
        (settings.share_mps, _MPS),
        (isolates, _CGROUP),
    )
    return [line for needed, lines in needs if needed for line in lines]


def listen_directives(settings: Settings) -> list[str]:
    """Return where the socket listens, nothing where its unit says so; raise InstallError."""
    streams: list[str] = []
    for word in settings.exporter_listen:
        address = _LISTEN.fullmatch(word)
        if not address or not 0 < int(address[2]) <= HIGHEST_PORT:
            raise InstallError(
                f"EXPORTER_LISTEN={word}: systemd listens on :PORT, ADDRESS:PORT or [IPv6]:PORT,"
                " not on a name; give the address"
            )
        streams.append(f"ListenStream={word if address[1] else address[2]}")
    return [] if streams == _UNIT_LISTENS else ["ListenStream=", *streams]
