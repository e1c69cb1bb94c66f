# SPDX-License-Identifier: Apache-2.0
"""This node as a hook sees it: settings, processes, lock directory, boot.

Hot.
"""

import os

from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.devices import Device
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store.locks import LockStore


class Node:
    """What every act on this node needs; made once a process."""

    def __init__(self, settings: Settings, name: str = "") -> None:
        self.settings = settings
        self.proc = Proc(settings.proc_root)
        self.store = LockStore(settings.lock_dir)
        self.name = name or os.uname().nodename
        try:
            self.boot_id = self.proc.boot_id()
        except OSError as fault:
            raise Refusal(UNKNOWN, f"boot id: {fault}", "is /proc mounted?") from fault
        self.inventory: dict[str, str] = {}
        self._known: list[Device] = []

    def devices(self, cards: "list[Device] | None" = None) -> list[Device]:
        """Return the node's devices by index; raise Refusal(BROKEN) without a driver.

        `cards` are those that the driver shows, where they were read already.
        """
        from gpulock.node import device_list  # not for a release

        settings = self.settings
        self.inventory = device_list.read_nvml_inventory(settings.lock_dir, self.boot_id)
        if cards is None:
            cards = device_list.read_devices(settings.driver_root, settings.sys_root)
        self._known = device_list.apply_nvml_inventory(cards, self.inventory)
        return self._known

    def known_devices(self) -> list[Device]:
        """Return the devices as they were read last, for a caller that holds the gate.

        Nobody reads the driver with the gate held: such a read may never return, and shuts the
        node. The caller reads before; none are known where no driver was loaded then.
        """
        return self._known

    def devices_if_driver(self) -> list[Device]:
        """Return the node's devices, none where no driver is loaded: then none can be open."""
        try:
            return self.devices()
        except Refusal:
            return []
