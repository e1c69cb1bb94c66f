# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on every node: settings, locks and records, boot, driver, device nodes."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.doctor.check import (
    DRIVER,
    INSTALLED,
    Check,
    Finding,
    fact,
    fault,
    warning,
)
from gpulock.install.setting_faults import find_setting_faults
from gpulock.node import device_list
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store import atomic, boot
from gpulock.store.locks import LockStore, check_folder
from gpulock.store.quarantine import FOLDER, LOST, LOST_MARK
from gpulock.text.words import format_count

UNREADABLE = "users cannot read {}: their commands are refused, and on Slurm each of their tasks"
_GATE_MODE = 0o600  # a user who may open the gate can block the node
_MEND = "correct the file, or upgrade gpulock here where the key is of a later version"


def check_settings(settings: Settings, path: Path) -> Iterator[Finding]:
    """Name what is wrong in the settings file."""
    for what in settings.faults:
        yield fault(what, f"{_MEND}; then: systemctl reload gpulockd")
    for what in find_setting_faults(settings):
        yield fault(what, f"correct it in {path}")
    if path.exists() and not path.stat().st_mode & stat.S_IROTH:
        yield warning(UNREADABLE.format(path), f"chmod 644 {path}, unless it has a password")


def node_checks(settings: Settings) -> list[Check]:
    """Return the checks of the node itself."""
    return [
        Check("LOCK_DIR", lambda: check_lock_dir(settings)),
        Check("STATE_DIR", lambda: check_state_dir(settings)),
        Check("boot", lambda: check_boot_locks(settings), ("LOCK_DIR",)),
        Check(DRIVER, lambda: check_driver(settings), (INSTALLED,)),
        Check("EXPECTED_GPUS", lambda: check_gpu_number(settings), (DRIVER,)),
        Check("device nodes", lambda: check_device_nodes(settings), (DRIVER,)),
    ]


def check_lock_dir(settings: Settings) -> Iterator[Finding]:
    """Look at both folders of locks and records, and at the gate's mode."""
    store = LockStore(settings.lock_dir)
    folders = [path for path in (store.path, store.root) if os.path.lexists(path)]
    if wrong := [one for path in folders for one in check_lock_folder(path)]:
        yield from wrong
        return
    yield from check_locks_readable(store)
    gate = Path(store.root, "gate")
    mode = stat.S_IMODE(gate.stat().st_mode) if gate.exists() else _GATE_MODE
    if mode != _GATE_MODE:
        what = f"{gate} has mode {mode:04o}: any user can block it"
        yield fault(what, f"chmod 600 {shlex.quote(str(gate))}", "gate")


def check_lock_folder(path: str) -> Iterator[Finding]:
    """Look at owner, mode and file system of one folder."""
    try:
        check_folder(path, make=False)
    except Refusal as refusal:
        yield fault(refusal.why, refusal.do)
        return
    if bad := boot.why_not_local(path, boot.file_system_type(path)):
        yield fault(*bad)
    elif why := why_unwritable(path):
        yield fault(f"{path} cannot be written: {why}", "make room, or mount it read-write")


def check_locks_readable(store: LockStore) -> Iterator[Finding]:
    """Name each lock that nobody can read: no reap frees it."""
    for name, lock in store.read_all_locks().items():
        path = f"{store.locks_dir}/{name}"
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            what = f"{path} is no directory: its device is never granted"
            yield fault(what, f"rm {shlex.quote(path)}", "locks")
        elif lock.fault:
            yield fault(f"{name}: {lock.fault}", f"run gpulock why {name}", "locks")


def check_boot_locks(settings: Settings) -> Iterator[Finding]:
    """Look whether records and locks of this boot are all there."""
    node = Node(settings)
    if node.store.boot_id() == node.boot_id:
        yield from check_records_readable(node.store)
    elif lost := boot.lost_records_refusal(node.store, settings.state_dir, node.boot_id):
        yield fault(f"{lost.why}: nothing is granted", lost.do)


def check_records_readable(store: LockStore) -> Iterator[Finding]:
    """Name each record at which every claim stops: it cannot be read, nor be written back."""
    unreadable: dict[str, str] = {}
    store.read_all_locks(unreadable)
    for token, why in unreadable.items():
        what = f"the record of claim {token} cannot be read ({why}): nothing is granted"
        path = shlex.quote(f"{store.claims_dir}/{token}")
        yield fault(what, f"once no job is left: rm -r {path}", "locks")


def why_unwritable(path: str) -> str:
    """Return why no file can be written in a folder, or nothing."""
    try:
        atomic.replace_file(f"{path}/.doctor", b"x" * 512)
        os.unlink(f"{path}/.doctor")
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def check_state_dir(settings: Settings) -> Iterator[Finding]:
    """Look at owner and mode of STATE_DIR."""
    path = Path(settings.state_dir)
    try:
        info = path.stat()  # a link to another disk is right
    except FileNotFoundError:
        info = None
    if path.is_symlink() and info is None:
        yield fault(f"{path} is a link that leads nowhere", "mount what it leads to")
    elif info and (info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        what = f"{path} has uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}"
        name = shlex.quote(str(path))
        yield fault(what, f"chown {os.geteuid()} {name}; chmod 755 {name}")
    elif info and (why := why_unwritable(str(path))):
        yield fault(f"{path} cannot be written: {why}", "make room, or mount it read-write")
    mark, node = path / LOST_MARK, Node(settings)
    gone = not (path / FOLDER).is_dir() and node.store.boot_id() == node.boot_id
    if gone or mark.exists():
        do = f"quarantine again what was out of service, then: rm -f {shlex.quote(str(mark))}"
        yield fault(f"{path / FOLDER}{LOST}", do, "quarantine")


def check_driver(settings: Settings) -> Iterator[Finding]:
    """Look at the devices that the driver shows, and at their UUIDs."""
    try:
        shown = device_list.read_devices(settings.driver_root, settings.sys_root)
    except Refusal as refusal:
        yield fault(refusal.why, refusal.do)
        return
    yield fact(format_count(len(shown), "GPU"))
    for device in shown:
        if device.fault:
            yield fault(f"{device.id}: {device.fault}", "look at dmesg and the card")
    if any(not device.uuid for device in shown):
        what = "the driver does not list all UUIDs yet: containers lack them"
        state = fault if settings.visible_devices == "uuid" else warning
        yield state(what, "run nvidia-persistenced", "UUIDs")


def check_gpu_number(settings: Settings) -> Iterator[Finding]:
    """Compare the number of GPUs with EXPECTED_GPUS."""
    wanted = settings.expected_gpus
    there = len(device_list.read_devices(settings.driver_root, settings.sys_root))
    if not wanted:
        what = f"not set: a card that falls out ({there} are there) is not missed"
        yield warning(what, f"set EXPECTED_GPUS={there} in the settings")
    elif wanted > there:
        do = "look at dmesg and the cards; lower EXPECTED_GPUS if one was taken out"
        yield fault(f"{there} of {wanted} GPUs are there", do)
    elif wanted < there:
        yield warning(f"{there} GPUs are there, not {wanted}", "correct EXPECTED_GPUS")


def check_device_nodes(settings: Settings) -> Iterator[Finding]:
    """Name the device nodes that are missing."""
    shown = device_list.read_devices(settings.driver_root, settings.sys_root)
    paths = [f"{settings.dev_root}/nvidia{device.minor}" for device in shown if not device.fault]
    if missing := [path for path in paths if not os.path.exists(path)]:
        do = "run nvidia-modprobe -u -c0, or nvidia-smi as root"
        yield fault(f"{' '.join(missing)}: missing", do)
