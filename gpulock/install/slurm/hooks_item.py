# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks as an item, which stays while a Slurm job of this node holds a device."""

from __future__ import annotations

from pathlib import Path

from gpulock.install.items import Item, PlaceItem, Remainder, Wanted
from gpulock.install.uninstall import FORCE, WAIT_OR_REAP
from gpulock.install.versions import InstalledHooks, list_locked_devices
from gpulock.store.locks import LockStore


class SlurmHooks(PlaceItem):
    """The rendered hooks; `force` takes them from under jobs that hold devices."""

    def __init__(
        self, place: InstalledHooks, value: str, needs: tuple[Item, ...] = (), force: bool = False
    ) -> None:
        super().__init__(place, value, needs)
        self.lock_dir, self.force = place.lock_dir, force

    def show(self, wanted: Wanted) -> list[str]:
        return [] if wanted is Wanted.ABSENT and self._held() else super().show(wanted)

    def remainder(self, wanted: Wanted) -> Remainder | None:
        held = self._held() if wanted is Wanted.ABSENT and self.place.read() is not None else []
        if not held:
            return None
        what = f"Slurm jobs hold {len(held)} devices ({' '.join(held)})"
        return Remainder(f"{what}: {WAIT_OR_REAP}, or {FORCE}")

    def _held(self) -> list[str]:
        return [] if self.force else list_slurm_devices(self.lock_dir)


def list_slurm_devices(lock_dir: Path) -> list[str]:
    """Return the devices that Slurm jobs hold, or of which the holder cannot be told."""
    store = LockStore(str(lock_dir))
    return [
        name
        for name in list_locked_devices(lock_dir)
        if (owner := store.read(name).owner) is None or owner.scheduler == "slurm"
    ]
