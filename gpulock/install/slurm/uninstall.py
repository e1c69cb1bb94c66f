# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm`: take this node's part away, once Slurm no longer leads to it.

The hooks of both schedulers are one folder behind one link. Who is uninstalled first hands the
folder and the settings into the other's keeping.
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
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.sge.install import current_settings
from gpulock.install.sge.install import sge_install_record as sge_record
from gpulock.install.sge.uninstall import log_forced_uninstall
from gpulock.install.slurm.configured_hooks import find_slurm_hooks
from gpulock.install.slurm.gres_copy import GresCopy
from gpulock.install.slurm.hook_trial import SlurmHooks
from gpulock.install.slurm.install import slurm_install_record
from gpulock.install.slurm.site import find_slurm_site, find_slurmds, slurmds_of_site
from gpulock.install.slurm.texts import hook_removal_page
from gpulock.install.versions import CURRENT, list_locked_devices
from gpulock.node.settings import Settings
from gpulock.store.locks import LockStore


def undo_slurm_install(
    config: Path, echo: Callable[[str], None], *, force: bool = False, reason: str = ""
) -> list[str]:
    """Put back what was there before; return what was left as it is, and why.

    Raises InstallError while Slurm jobs hold devices, and while Slurm still starts the hooks: a
    Prolog that is missing drains the node. With `force` a reason is needed.
    """
    settings, given = current_settings(config)
    record = slurm_install_record(settings)
    if not record.load():
        return []
    held = held_by_slurm(Path(settings.lock_dir))
    if held and not (force and reason):
        raise InstallError(
            f"Slurm jobs hold {len(held)} devices ({' '.join(held)}): wait for them, or --force"
            " --reason TEXT"
        )
    prefixes = [Path(address[1]) for address in record.load() if address[0] == "hooks"]
    prefixes += [Path(a[1]) for a in sge_record(settings).load() if a[0] == "hooks"]
    for prefix in dict.fromkeys(prefixes):
        try:
            lines = slurm_hook_references(settings, given, prefix)
        except InstallError as fault:
            if not (force and reason):
                why = f"whether Slurm still starts the hooks cannot be found out: {fault}"
                raise InstallError(why) from fault
            lines = []
        for line in lines:
            echo(line)
        if lines and not (force and reason):
            raise InstallError(
                "Slurm still starts the hooks, and without them drains its nodes; take out what is"
                " named above, everywhere, then scontrol reconfigure, and run it again"
            )
    if held:
        log_forced_uninstall(f"Slurm's hooks uninstalled by force, {' '.join(held)}: {reason}")
    if transfer_shared_hooks(record, sge_record(settings)):
        echo("the hooks and the settings stay: Grid Engine uses them")
    left = undo_recorded_changes(
        record, lambda address: make_slurm_place(address, settings), echo, lambda _: ""
    )
    if not left:
        FolderPlace(record.path.parent).write(None)
    return left


def held_by_slurm(lock_dir: Path) -> list[str]:
    """Return the devices that Slurm jobs hold, or of which the holder cannot be told."""
    store = LockStore(str(lock_dir))
    return [
        name
        for name in list_locked_devices(lock_dir)
        if (owner := store.read(name).owner) is None or owner.scheduler == "slurm"
    ]


def slurm_hook_references(settings: Settings, given: frozenset[str], prefix: Path) -> list[str]:
    """Return what leads Slurm to our hooks and must go first; raise InstallError."""
    paths = HookPaths(prefix / CURRENT)
    site = find_slurm_site(settings, given, slurmds_of_site(find_slurmds(), settings))
    return hook_removal_page(find_slurm_hooks(site.best(), paths), paths)


def make_slurm_place(address: tuple[str, ...], settings: Settings) -> Place:
    """Return the place that an address of the record means; raise InstallError."""
    kind, *rest = address
    if kind == "file":
        return FilePlace(Path(rest[0]), int(rest[1], 8))
    if kind == "hooks":
        return SlurmHooks(Path(rest[0]), Path(rest[1]), rest[2], Path(settings.lock_dir))
    if kind == "gres-copy":
        return GresCopy(Path(rest[0]), Path(rest[1]))
    raise InstallError(f"a place of kind {kind} is not known; use the gpulock that made it")


# --- one folder of hooks for two schedulers -----------------------------------------------------


def transfer_shared_hooks(giver: InstallRecord, taker: InstallRecord) -> bool:
    """Give hooks and settings into the keeping of another scheduler, if that is installed."""
    entries, kept = giver.load(), taker.load()
    if not kept:
        return False
    config = {address[2] for address in entries if address[0] == "hooks"}
    config |= {address[2] for address in kept if address[0] == "hooks"}
    shared = [a for a in entries if a[0] == "hooks" or (a[0] == "file" and a[1] in config)]
    if not shared:
        return True
    result = dict(kept)
    for address in shared:
        before, after = entries.pop(address)
        if address in kept:
            result[address] = merge_recorded_changes((before, after), kept[address])
        else:  # first, so that it is taken back last
            result = {address: (before, after), **result}
    taker.save(result)
    giver.save(entries)
    return True


def merge_recorded_changes(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> tuple[str | None, str | None]:
    """Return the one change that two records of a place amount to; pure."""
    if one[1] == other[0]:
        return (one[0], other[1])
    if other[1] == one[0]:
        return (other[0], one[1])
    return (None if None in (one[0], other[0]) else other[0], other[1])


def keep_for_slurm(config: Path) -> bool:
    """Before Grid Engine's part is uninstalled, keep what Slurm's needs; raise InstallError."""
    settings, _ = current_settings(config)
    return transfer_shared_hooks(sge_record(settings), slurm_install_record(settings))
