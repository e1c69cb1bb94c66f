# SPDX-License-Identifier: Apache-2.0
"""Which of the node's GPU device numbers a job may open: a function of what it was granted.

Hot. Of the closed majors only what is named is open, so a card that comes later is closed too.
Everything else in /dev (nvidia-uvm and the rest of the machine) is left as it is.
"""

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.node.devices import MAJOR, Device
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Rules = dict[int, frozenset[int]]  # closed major -> minors that are open all the same

CONTROL: tuple[int, ...] = (254, 255)  # nvidia-modeset, nvidiactl: every CUDA program's
# Of no card: no instance can be used without the node of its card, so its own may stay open.
CLOSE_ALL_GPUS: "Rules" = {MAJOR: frozenset(CONTROL)}
CAPS = "nvidia-caps"  # in /proc/devices: the access nodes of MIG instances
CAP_NODE = "nvidia-caps/nvidia-cap"


def device_rules(
    granted: "Iterable[Device]", caps_major: "int | None", driver_root: str
) -> "Rules":
    """Return what to close and what of it to leave open; an empty grant closes every GPU.

    `caps_major` is None where the driver has none. Raises Refusal where the number of a device
    that was granted is not known.
    """
    gpus: set[int] = set(CONTROL)
    instances: set[int] = set()
    for device in granted:
        if not 0 <= device.minor < min(CONTROL):
            raise Refusal(UNKNOWN, f"the minor of {device.id} is not known", "see gpulock doctor")
        gpus.add(device.minor)
        if device.parent:
            instances.update(mig_access_minors(device, driver_root))
    rules = {MAJOR: frozenset(gpus)}
    if caps_major is not None:
        rules[caps_major] = frozenset(instances)
    elif instances:
        raise Refusal(BROKEN, f"/proc/devices has no {CAPS}", "look at the driver")
    return rules


def mig_access_minors(device: Device, driver_root: str) -> list[int]:
    """Return the minors of a MIG instance's own nodes; raise Refusal where they are not told."""
    from gpulock.alloc.device_users import mig_access_nodes

    names = mig_access_nodes(device, driver_root)
    if not names:
        raise Refusal(
            UNKNOWN,
            f"the driver does not list the access nodes of {device.id}",
            "check `nvidia-smi mig -lgi`",
        )
    return [int(name.removeprefix(CAP_NODE)) for name in names]


def read_caps_major(proc_root: str) -> "int | None":
    """Return the major of nvidia-caps, None where the driver has none; raise Refusal."""
    try:
        return parse_device_major(CAPS, atomic.read_text(f"{proc_root}/devices"))
    except OSError as fault:
        raise Refusal(UNKNOWN, f"device numbers: {fault}", "is /proc mounted?") from fault


def parse_device_major(name: str, text: str) -> "int | None":
    """Return the major of a character device by the text of /proc/devices, None for none."""
    for line in text.partition("Block devices")[0].split("\n"):
        number, _, driver = line.strip().partition(" ")
        if driver == name and number.isdecimal():
            return int(number)
    return None
