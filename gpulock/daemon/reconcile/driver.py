# SPDX-License-Identifier: Apache-2.0
"""Read the devices although the driver may hang: in a thread, with a deadline.

A read below /proc/driver/nvidia waits for the driver's own locks, and no signal ends it. One
thread asks at a time: as long as one does not come back, nobody asks again.
"""

from __future__ import annotations

from gpulock.daemon.core.background_call import NoAnswerError, PatientCaller
from gpulock.daemon.reconcile.reconcile import DriverCard
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node import devices
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings

SILENT = "the NVIDIA driver does not answer"
SECONDS = 5.0  # a healthy driver answers in 30 us a card


class DaemonNode(Node):
    """The node as gpulockd sees it, which must go on whatever the driver does."""

    __slots__ = ("caller", "cards")

    def __init__(self, settings: Settings, name: str = "", patience: float = SECONDS) -> None:
        super().__init__(settings, name)
        self.caller = PatientCaller[list[Device]](patience)
        self.cards: dict[str, DriverCard] = {}  # by bus id, as the driver showed them last

    def ask_driver(self) -> list[Device]:
        """Return what the driver shows, which may take for ever; raise Refusal."""
        settings = self.settings
        return devices.read_devices(settings.driver_root, settings.sys_root)

    def devices(self, cards: list[Device] | None = None) -> list[Device]:
        """Return the devices; raise Refusal: UNKNOWN where the driver does not answer in time."""
        self.cards = {}
        try:
            found = self.caller.ask(self.ask_driver)
        except NoAnswerError:
            raise Refusal(UNKNOWN, SILENT, "look at dmesg") from None
        self.cards = {d.bus: DriverCard(d.minor, d.uuid) for d in found if not d.fault}
        return super().devices(found)
