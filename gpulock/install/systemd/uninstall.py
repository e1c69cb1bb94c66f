# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall systemd`: stop both services, and put back what was there before.

Locks, history and the exporter's user stay: the hooks work without a daemon, and a user's number
that is given away again could own files of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpulock.install.change import (
    FilePlace,
    FolderPlace,
    InstallRecord,
    Place,
    undo_recorded_changes,
)
from gpulock.install.hooks import InstallError
from gpulock.install.sge.install import current_settings
from gpulock.install.systemd import manager
from gpulock.install.systemd.install import exporter_user_exists, systemd_install_record
from gpulock.install.systemd.manager import ON, Systemctl, SystemdService
from gpulock.install.systemd.units import USER


def undo_systemd_install(
    config: Path,
    echo: Callable[[str], None],
    ctl: Systemctl = manager.systemctl,
) -> list[str]:
    """Put back what was there before; return what was left as it is, and why."""
    settings, _ = current_settings(config)
    record = systemd_install_record(settings)
    if not record.load():
        return []
    were_on = stop_services(record, echo, ctl)
    left = undo_recorded_changes(record, make_systemd_place, echo, lambda _: "")
    ctl("daemon-reload")
    for service in were_on:
        service.write(ON)
    if exporter_user_exists():
        echo(f"user {USER} stays, and so do locks and history")
    if not left:
        FolderPlace(record.path.parent).write(None)
    return left


def stop_services(
    record: InstallRecord, echo: Callable[[str], None], ctl: Systemctl
) -> list[SystemdService]:
    """Stop and disable the services, however they are now; return those that were on before us."""
    entries = record.load()
    before: list[SystemdService] = []
    for address, (was, _) in reversed(list(entries.items())):
        if address[0] != "service":
            continue
        service = SystemdService(address[1], address[2:], ctl)
        service.write(None)
        echo(f"stopped and disabled: {service.name}")
        before += [service] if was == ON else []
        del entries[address]
        record.save(entries)
    return before


def make_systemd_place(address: tuple[str, ...]) -> Place:
    """Return the place that an address of the record means; raise InstallError."""
    kind, *rest = address
    if kind == "file":
        return FilePlace(Path(rest[0]), int(rest[1], 8))
    if kind == "made":  # what was made from it stays
        return FilePlace(Path(rest[0]))
    raise InstallError(f"a place of kind {kind} is not known; use the gpulock that made it")
