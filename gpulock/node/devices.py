# SPDX-License-Identifier: Apache-2.0
"""The devices of this node: a card, an instance of one, a place on one, and how locks name them.

Hot. `device_list` reads them.
"""

MAJOR = 195  # /dev/nvidiaN, Documentation/admin-guide/devices.txt of the kernel
BUS_PARTS = 3  # domain, bus, device.function
SHARE = ".share"  # in a lock id: a place on a card, which several owners hold at a time


class Device:
    """A GPU, or an instance of one in MIG mode, that can be granted.

    `id` names the lock: PCI bus id, with `.gi<g>.ci<c>` for an instance, `.share<n>` for a place on
    a GPU that is shared. `parent` is the bus id of an instance's GPU, empty for a GPU and a share.
    `index` is the GPU's NVML index, `minor` the N of /dev/nvidiaN, `numa` -1 where the kernel does
    not know. `path` is the chain of PCI bridges from the root. `fault` says why it cannot be
    granted, by the driver; `withheld`: it is in MIG mode, and NVML's data has no instance of it.
    `places` is how many its card has, of a share that gpulock counts.
    """

    def __init__(self, name: str, index: int) -> None:
        self.id = name
        self.bus = card_bus_id(name)
        self.parent = self.bus if ".gi" in name else ""
        self.index = index
        self.minor = -1
        self.uuid = ""
        self.model = ""
        self.numa = -1
        self.path: tuple[str, ...] = ()
        self.memory_mib = 0
        self.places = 0
        self.profile = ""
        self.switched = False
        self.fault = ""
        self.withheld = False

    def label(self) -> str:
        """Return what names it among its neighbours: `0`, or `0:gi1.ci0`."""
        return f"{self.index}:{self.id[len(self.bus) + 1 :]}" if self.parent else str(self.index)


def pci_bus_key(bus: str) -> tuple[int, int, int, int]:
    """Return the sort key of `0000:3b:00.0`; raise ValueError for anything else."""
    parts = bus.split(":")
    if len(parts) != BUS_PARTS:
        raise ValueError(f"not a PCI bus id: {bus!r}")
    slot, _, function = parts[2].partition(".")
    return (int(parts[0], 16), int(parts[1], 16), int(slot, 16), int(function, 16))


def card_bus_id(name: str) -> str:
    """Return the PCI bus id in a lock id."""
    return name.partition(".gi")[0].partition(SHARE)[0]


def lock_ids_overlap(a: str, b: str) -> bool:
    """Return whether two locks cannot be held at a time by the same silicon.

    They are equal, or of a card and of its instance or share, or of an instance and a share of one
    card, whose MIG mode was changed. Two shares of a card can.
    """
    if a == b or a.startswith(f"{b}.") or b.startswith(f"{a}."):
        return True
    return (SHARE in a) is not (SHARE in b) and card_bus_id(a) == card_bus_id(b)


def place_device(card: Device, name: str, places: int) -> Device:
    """Return a place on a card under its own id, as one of so many (0: not known)."""
    place = Device(name, card.index)
    place.__dict__ = {**card.__dict__, "id": name, "parent": place.parent, "places": places}
    return place
