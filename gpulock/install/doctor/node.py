# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on every node: settings, directories, boot, driver, device nodes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.doctor.check import Check, fault_check, ok_check, run_checks, warning_check
from gpulock.node import devices
from gpulock.node.context import Node
from gpulock.node.settings import Settings, read_settings
from gpulock.store import atomic, boot
from gpulock.store.locks import LockStore

_GATE_MODE = 0o600  # whoever may open the gate can block the node


def check_settings_file(path: Path) -> tuple[Settings | None, Check]:
    """Return the settings, None where no hook would take them, and the check of them."""
    name = "settings"
    try:
        settings = read_settings(str(path))
    except Refusal as refusal:
        return None, fault_check(name, refusal.why, refusal.do)
    if not path.exists():
        do = "run gpulock install sge or slurm"
        return settings, warning_check(name, f"no {path}: all defaults", do)
    return settings, ok_check(name, str(path))


def node_checks(settings: Settings) -> list[Check]:
    """Return the checks of the node itself."""
    return [
        *run_checks("LOCK_DIR", lambda: check_lock_dir(settings)),
        *run_checks("STATE_DIR", lambda: check_state_dir(settings)),
        *run_checks("boot", lambda: check_boot_locks(settings)),
        *run_checks("driver", lambda: check_driver_devices(settings)),
    ]


def check_lock_dir(settings: Settings) -> Iterator[Check]:
    """Look at owner, mode and file system of LOCK_DIR, and at the gate's mode."""
    name, path = "LOCK_DIR", settings.lock_dir
    if not os.path.lexists(path):
        yield ok_check(name, f"{path} is not there yet: the first claim makes it")
        return
    try:
        LockStore(path).check()
    except Refusal as refusal:
        yield fault_check(name, refusal.why, refusal.do)
        return
    kind = boot.file_system_type(path)
    if kind not in boot.LOCAL_FILE_SYSTEMS:
        yield fault_check(name, f"{path} is on {kind}", "put it on tmpfs: LOCK_DIR=/run/gpulock")
        return
    if why := why_unwritable(path):
        yield fault_check(
            name, f"{path} cannot be written: {why}", "make room, or mount it read-write"
        )
        return
    yield ok_check(name, f"{path} on {kind}")
    yield from check_locks_readable(LockStore(path))
    gate = Path(path, "gate")
    if gate.exists() and stat.S_IMODE(gate.stat().st_mode) != _GATE_MODE:
        mode = stat.S_IMODE(gate.stat().st_mode)
        yield fault_check(
            "gate", f"{gate} has mode {mode:04o}: any user can block it", f"chmod 600 {gate}"
        )


def check_locks_readable(store: LockStore) -> Iterator[Check]:
    """Name each lock that nobody can read: no reap frees it."""
    found = store.read_all_locks() if store.exists() else {}
    for name, lock in found.items():
        path = f"{store.locks_dir}/{name}"
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            yield fault_check(
                "locks", f"{path} is no folder: its device goes to nobody", f"rm {path}"
            )
        elif lock.fault:
            yield fault_check("locks", f"{name}: {lock.fault}", f"run gpulock why {name}")


def why_unwritable(path: str) -> str:
    """Return why no file can be written in a folder, or nothing."""
    try:
        atomic.replace_file(f"{path}/.doctor", b"x" * 512)
        os.unlink(f"{path}/.doctor")
    except OSError as fault:
        return fault.strerror or str(fault)
    return ""


def check_state_dir(settings: Settings) -> Iterator[Check]:
    """Look at owner and mode of STATE_DIR."""
    name, path = "STATE_DIR", Path(settings.state_dir)
    try:
        info = path.lstat()
    except FileNotFoundError:
        yield fault_check(name, f"{path} is missing: no claim is granted", f"mkdir -m 755 {path}")
        return
    if not stat.S_ISDIR(info.st_mode):
        yield fault_check(name, f"{path} is no directory", "remove it")
    elif info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        found = f"uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}"
        yield fault_check(
            name, f"{path} has {found}", f"chown {os.geteuid()} {path}; chmod 755 {path}"
        )
    elif why := why_unwritable(str(path)):
        yield fault_check(
            name, f"{path} cannot be written: {why}", "make room, or mount it read-write"
        )
    else:
        yield ok_check(name, str(path))


def check_boot_locks(settings: Settings) -> Iterator[Check]:
    """Look whether the locks of this boot are all there."""
    name = "boot"
    node = Node(settings)
    ours = node.store.boot_id() if os.path.isdir(settings.lock_dir) else ""
    if ours == node.boot_id:
        yield ok_check(name, "LOCK_DIR is of this boot")
    elif boot.read_state_boot_id(settings.state_dir) == node.boot_id:
        do = "run gpulock reap as root: it puts back a lock for every job that lives"
        yield fault_check(name, "the locks of this boot were lost: nothing is granted", do)
    else:
        yield ok_check(name, "nothing was claimed since this boot")


def check_driver_devices(settings: Settings) -> Iterator[Check]:
    """Look at the devices the driver shows, their number, their nodes in /dev, their UUIDs."""
    name = "driver"
    try:
        found = devices.read_devices(settings.driver_root, settings.sys_root)
    except Refusal as refusal:
        yield fault_check(name, refusal.why, refusal.do)
        return
    if not settings.expected_gpus:
        do = f"set EXPECTED_GPUS={len(found)} in the settings"
        yield warning_check(
            "EXPECTED_GPUS",
            f"not set: a card that falls out ({len(found)} are there) is not missed",
            do,
        )
    elif settings.expected_gpus > len(found):
        do = "look at dmesg and the cards; lower EXPECTED_GPUS if one was taken out"
        yield fault_check(
            "EXPECTED_GPUS", f"{len(found)} of {settings.expected_gpus} GPUs are there", do
        )
    elif settings.expected_gpus < len(found):
        yield warning_check(
            "EXPECTED_GPUS",
            f"{len(found)} GPUs are there, not {settings.expected_gpus}",
            "correct EXPECTED_GPUS",
        )
    else:
        yield ok_check("EXPECTED_GPUS", f"all {settings.expected_gpus} are there")
    for device in found:
        if device.fault:
            yield fault_check(name, f"{device.id}: {device.fault}", "look at dmesg and the card")
    yield from check_device_nodes(settings, [d for d in found if not d.fault])
    if any(not device.uuid for device in found):
        what = (
            "the driver does not tell all UUIDs yet: containers and VISIBLE_DEVICES=uuid lack them"
        )
        do = "run nvidia-persistenced"
        yield (fault_check if settings.visible_devices == "uuid" else warning_check)(
            "UUIDs", what, do
        )


def check_device_nodes(settings: Settings, found: list[devices.Device]) -> Iterator[Check]:
    """Look at the device nodes; a simulated node's are no devices."""
    name = "device nodes"
    bad: list[str] = []
    for device in found:
        path = f"{settings.dev_root}/nvidia{device.minor}"
        try:
            info = os.stat(path)
        except FileNotFoundError:
            bad.append(f"{path} is missing")
            continue
        number = (os.major(info.st_rdev), os.minor(info.st_rdev))
        if settings.dev_root == "/dev" and number != (devices.MAJOR, device.minor):
            bad.append(f"{path} is no NVIDIA device")
    minors = [device.minor for device in found]
    if len(set(minors)) != len(minors):
        bad.append(f"two GPUs have one minor number ({sorted(minors)})")
    if bad:
        yield fault_check(name, "; ".join(bad), "run nvidia-modprobe -u -c0, or nvidia-smi as root")
    else:
        yield ok_check(name, f"{len(found)} below {settings.dev_root}")
