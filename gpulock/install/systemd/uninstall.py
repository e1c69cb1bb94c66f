# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall systemd`: stop both services, and put back what was there before.

Locks, history and the exporter's user stay: the hooks work without a daemon, and a user's number
that is given away again could own files of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpulock.install.change import File, Folder, Place, Record, undo_all
from gpulock.install.hooks import InstallError
from gpulock.install.sge.install import current_settings
from gpulock.install.systemd import manager
from gpulock.install.systemd.install import record_of, user_exists
from gpulock.install.systemd.manager import ON, Service, Systemctl
from gpulock.install.systemd.units import USER


def uninstall_systemd(
    config: Path,
    echo: Callable[[str], None],
    ctl: Systemctl = manager.systemctl,
) -> list[str]:
    """Put back what was there before; return what was left as it is, and why."""
    settings, _ = current_settings(config)
    record = record_of(settings)
    if not record.load():
        return []
    were_on = stop(record, echo, ctl)
    left = undo_all(record, place, echo, lambda _: "")
    ctl("daemon-reload")
    for service in were_on:
        service.write(ON)
    if user_exists():
        echo(f"user {USER} stays, and so do locks and history")
    if not left:
        Folder(record.path.parent).write(None)
    return left


def stop(record: Record, echo: Callable[[str], None], ctl: Systemctl) -> list[Service]:
    """Stop and disable the services, however they are now; return those that were on before us."""
    entries = record.load()
    before: list[Service] = []
    for address, (was, _) in reversed(list(entries.items())):
        if address[0] != "service":
            continue
        service = Service(address[1], address[2:], ctl)
        service.write(None)
        echo(f"stopped and disabled: {service.name}")
        before += [service] if was == ON else []
        del entries[address]
        record.save(entries)
    return before


def place(address: tuple[str, ...]) -> Place:
    """Return the place that an address of the record means; raise InstallError."""
    kind, *rest = address
    if kind == "file":
        return File(Path(rest[0]), int(rest[1], 8))
    if kind == "made":  # what was made from it stays
        return File(Path(rest[0]))
    raise InstallError(f"a place of kind {kind} is not known; use the gpulock that made it")
