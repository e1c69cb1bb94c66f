# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd` and `uninstall systemd`: gpulockd and the exporter as services.

A package has the units, and the administrator's settings make one drop-in of each. Another
installation puts its units below /usr/local. Locks are none of systemd's: they outlive every start,
stop and upgrade of a service, and stay with history when services go. So does the exporter's user:
a user's number that is given away again could own files of the one before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.items import FileItem, InstallParts, Item
from gpulock.install.node_part import NodePart
from gpulock.install.systemd import manager, units
from gpulock.install.systemd.manager import ServiceItem, UnitFile
from gpulock.install.trial import why_users_cannot_run
from gpulock.isolation.marks import MARK
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH
from gpulock.store.locks import claims_root

SERVICES: Final = {"gpulock-exporter": (units.SOCKET, units.EXPORTER), "gpulockd": (units.DAEMON,)}
DROP_IN: Final = "10-gpulock.conf"  # before those of `systemctl edit`, which win
_ETC_FILES: Final = (units.SYSUSERS, units.TMPFILES)
# What ProtectHome= and PrivateTmp= hide.
_HIDDEN: Final = ("/root/", "/home/", "/run/user/", "/tmp/", "/var/tmp/")
_DO: Final = "install gpulock into a folder such as /opt/gpulock"


@dataclass(frozen=True)
class SystemdOptions:
    """What the administrator asks for; files go below `root`."""

    config: Path = Path(DEFAULT_PATH)
    python: str = sys.executable
    root: Path = Path("/")
    ctl: manager.Systemctl = field(default=manager.systemctl, compare=False)

    @property
    def is_package(self) -> bool:
        """Say whether this gpulock is a distribution's package, which has the units."""
        return self.python == units.PACKAGE_PYTHON

    def unit_path(self, unit: str) -> Path:
        """Return where a unit's file is."""
        prefix = "usr/lib" if self.is_package else "usr/local/lib"
        return self.root / prefix / "systemd/system" / unit

    @property
    def sysusers(self) -> Path:
        """Return the file of the exporter's user."""
        return self.root / ("usr/lib" if self.is_package else "etc") / units.SYSUSERS

    def drop_in_path(self, unit: str) -> Path:
        """Return where a unit's drop-in is."""
        return self.root / "etc/systemd/system" / f"{unit}.d" / DROP_IN


def etc_items(options: SystemdOptions) -> list[FileItem]:
    """Return what is ours in /etc; of a package's own nothing. Raises InstallError."""
    if options.is_package:
        return []
    static, etc = units.read_static_files(), options.root / "etc"
    return [FileItem(etc / name, static[name]) for name in _ETC_FILES]


def unit_items(options: SystemdOptions, drop_ins: Mapping[str, str]) -> dict[str, list[FileItem]]:
    """Return the files of each unit that are ours: it, but of a package's, and its drop-in.

    Raises InstallError.
    """
    static = {} if options.is_package else units.read_static_files()
    found: dict[str, list[FileItem]] = {}
    for unit, text in drop_ins.items():
        found[unit] = [UnitFile(options.drop_in_path(unit), text)]
        if static:
            found[unit].insert(0, UnitFile(options.unit_path(unit), static[unit]))
    return found


def service_items(
    options: SystemdOptions, files: Mapping[str, list[FileItem]]
) -> list[ServiceItem]:
    """Return the services, in the order in which they are started."""
    return [
        ServiceItem(
            name, own, [item for unit in own for item in files[unit]], options.sysusers, options.ctl
        )
        for name, own in SERVICES.items()
    ]


def drop_ins_of(options: SystemdOptions, settings: Settings) -> dict[str, str]:
    """Return each unit's drop-in for these settings; raise InstallError."""
    marked = Path(claims_root(settings.lock_dir), MARK).exists()
    return units.drop_in_texts(units.UnitInputs(options.python, options.config, settings, marked))


class SystemdInstaller(NodePart):
    """Find out what is to be there on this node, and what is."""

    def __init__(self, options: SystemdOptions) -> None:
        super().__init__(options.config, "systemd")
        self.options = options

    def parts(self) -> InstallParts:
        """Return all items; raise InstallError for what cannot be installed here."""
        options = self.options
        if self.settings.simulation:
            raise InstallError(
                f"{options.config} is a simulated node's: its services are no system's"
            )
        if not manager.RUNNING.is_dir():
            raise InstallError(
                "systemd does not run here; start gpulockd and gpulock-exporter yourself"
            )
        check_exporter_python(options.python)
        files = unit_items(options, drop_ins_of(options, self.settings))
        return InstallParts([*self.folders(), *self.items(files)], self.notes)

    def removal(self) -> InstallParts:
        """Return the items of which the last goes first: a service before its files."""
        files = unit_items(self.options, dict.fromkeys(units.UNITS, "any"))
        items = self.items(files)
        if manager.RUNNING.is_dir():
            items.insert(0, manager.LoadedUnits(units.UNITS, self.options.ctl))
        return InstallParts(items, self.notes)

    def items(self, files: Mapping[str, list[FileItem]]) -> list[Item]:
        """Return all but what stays, around the files of each unit."""
        flat = [item for own in files.values() for item in own]
        services = service_items(self.options, files) if manager.RUNNING.is_dir() else []
        return [*etc_items(self.options), *flat, *services]


def check_exporter_python(python: str) -> None:
    """Raise InstallError for an interpreter that the exporter's own user cannot use."""
    for path in (Path(python), Path(python).resolve(), manager.PACKAGE):
        if str(path).startswith(_HIDDEN):
            raise InstallError(f"{path} is in a folder that services do not see; {_DO}")
    if why := why_users_cannot_run(Path(python)):
        raise InstallError(f"interpreter {why}; the exporter runs as {units.USER}; {_DO}")
