# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks as an item, which stays while a Slurm job of this node holds a device."""

from __future__ import annotations

from gpulock.install.items import Item, PlaceItem, Remainder, Wanted
from gpulock.install.uninstall import FORCE, WAIT_OR_REAP
from gpulock.install.versions import InstalledHooks, list_held_devices


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
        return [] if self.force else list_held_devices(self.lock_dir, "slurm")
