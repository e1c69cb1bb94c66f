# SPDX-License-Identifier: Apache-2.0
"""ISOLATION=group: a device's node belongs to the supplementary group of the job that holds it.

Hot. The nodes follow the locks: prolog, epilog and reconcile set all of them to what the locks
say, under the gate, so that a killed hook leaves nothing over. A node
is a job's only while its shepherd runs: execd hands a group out again once that is gone, and the
group's next owner must not open what a dead job's lock still holds. Everything else is root's.
"""

import os

from gpulock.errors import (
    BROKEN,
    INVALID_REQUEST,
    UNKNOWN,
    Refusal,
    lost_locks_refusal,
    os_error_kind,
)
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.store import atomic, kv, owner
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.liveness import Judge
    from gpulock.store.owner import Owner

MODE = 0o660
PARAMS, SWITCH = "params", "ModifyDeviceFiles"  # of /proc/driver/nvidia


def check_group_grant(granted: list[Device], gid: int) -> None:
    """Refuse what a group cannot part: instances and shares have their card's node, and it one."""
    if gid <= 0:
        raise Refusal(
            UNKNOWN,
            "ISOLATION=group needs the job's own supplementary group, which only Grid Engine gives",
            "set ISOLATION=cgroup",
        )
    for device in granted:
        if device.parent or SHARE in device.id:
            what = "MIG instances" if device.parent else "shares of a GPU"
            why = f"ISOLATION=group cannot separate {what}"
            raise Refusal(INVALID_REQUEST, why, "set ISOLATION=cgroup")


def check_modify_device_files(driver_root: str) -> None:
    """Refuse where the driver sets its nodes' owner and mode again, whenever a program starts."""
    try:
        value = parse_modify_device_files(atomic.read_text(f"{driver_root}/{PARAMS}"))
    except OSError as fault:
        kind = os_error_kind(fault, BROKEN)
        raise Refusal(kind, f"the driver's parameters: {fault}", "load the driver") from fault
    if value != "0":
        raise Refusal(
            BROKEN,
            f"the driver opens its nodes to all again ({SWITCH}: {value or 'unknown'})",
            f"set the module's option NVreg_{SWITCH}=0",
        )


def parse_modify_device_files(text: str) -> str:
    """Return the value of ModifyDeviceFiles in the driver's parameters, empty where missing."""
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        if name.strip() == SWITCH:
            return value.strip()
    return ""


def job_groups_by_minor(held: dict[str, Lock], node: Node) -> dict[int, int]:
    """Return minor -> group of every device whose job has a shepherd that runs; raise OSError."""
    found: dict[int, int] = {}
    for lock in held.values():
        record = reread_owner(lock, node) if lock.fault else lock.owner
        if record is None or record.add_grp_id <= 0 or not record.minor.isdecimal():
            continue
        if record.boot_id == node.boot_id and node.proc.running(record.pid, record.start):
            found[int(record.minor)] = record.add_grp_id
    return found


def reread_owner(lock: Lock, node: Node) -> "Owner | None":
    """Return a record that could not be read; raise OSError, for its job may live and need it.

    None where it cannot be understood: what nobody can read opens nothing.
    """
    try:
        return owner.parse_owner(atomic.read_text(f"{node.store.locks_dir}/{lock.id}/owner"))
    except (FileNotFoundError, kv.MalformedError):
        return None


def check_task_group(granted: list[Device], gid: int, wanted: dict[int, int]) -> None:
    """Refuse a task whose job's devices are another group's: a node has one."""
    if any([wanted.get(device.minor) != gid for device in granted]):
        raise Refusal(
            INVALID_REQUEST,
            "ISOLATION=group gives a device to one group, and a slave task has its own",
            "set ISOLATION=cgroup",
        )


def apply_device_groups(node: Node, devices: list[Device]) -> dict[int, int]:
    """Make the nodes of all devices what the locks say, gate held; raise OSError.

    Returns minor -> group of those that are open. What is held is opened by its record, also
    where the driver does not show it now. Where a lock is lost, and its job may live, nothing is
    changed: Refusal.
    """
    held = node.store.read_all_locks()
    if lost := node.store.find_lost(held)[0]:
        raise lost_locks_refusal(f"the locks of {' '.join(lost)}")
    wanted = job_groups_by_minor(held, node)
    for minor in sorted({device.minor for device in devices if device.minor >= 0} | {*wanted}):
        set_device_group(f"{node.settings.dev_root}/nvidia{minor}", wanted.get(minor, 0))
    return wanted


def set_device_group(path: str, gid: int) -> None:
    """Give a device's node to root and one group; raise OSError.

    To be closed for a moment does no harm: the mode goes before a group that is to lose it.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (0, gid, MODE):
        return
    os.chmod(path, 0o600)
    os.chown(path, 0, gid)
    os.chmod(path, MODE)


def check_group_unused(judge: "Judge", gid: int) -> None:
    """Refuse a group that a process carries before its job has started: an older job's leftover."""
    left = judge.scan.carriers(gid)
    blind = judge.scan.why_blind_about(-1, gid)
    if left or blind:
        why = f"process {left[0]} of an older job has it" if left else blind
        raise Refusal(UNKNOWN, f"the job's group {gid} is not its own: {why}", f"kill {left[:3]}")
