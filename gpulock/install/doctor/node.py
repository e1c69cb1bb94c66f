# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on every node: settings, directories, boot, driver, device nodes."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from gpulock.alloc.shares import shares_of_card
from gpulock.daemon.mps.folder import MpsError, check_above_mps_dir
from gpulock.errors import Refusal, lost_records_refusal, one_line
from gpulock.install.doctor.check import OK, Check, fault, ok, run_all, warning
from gpulock.install.setting_faults import find_setting_faults
from gpulock.job.environment import loaded_driver_version
from gpulock.job.mps import cards_with_mps
from gpulock.node import devices
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.node.shares import count_places_by_card
from gpulock.store import atomic, boot
from gpulock.store.counters import read_history_dropped
from gpulock.store.grants import FINISHED_CAP
from gpulock.store.locks import RECORD, LockStore, check_folder
from gpulock.store.owner import Owner
from gpulock.store.quarantine import LOST, LOST_MARK, QUARANTINE
from gpulock.store.repair import find_unreadable_records

_MEND = "correct the file, or upgrade gpulock here where the key is of a later version"
MPS_MEMORY_DRIVER = 495  # of CUDA 11.5, the first that limits memory (docs/facts/nvml.md, mps)
_PAUSE = 0.2  # seconds; a claim is made or undone in less
_GATE_MODE = 0o600  # a user who may open the gate can block the node


def check_settings_file(path: Path) -> tuple[Settings | None, list[Check]]:
    """Return the settings, None where no hook would take them, and the checks of them."""
    name = "settings"
    try:
        settings = read_settings(str(path))
    except Refusal as refusal:
        return None, [fault(refusal.why, refusal.do, name)]
    if not path.exists() and not settings.faults:
        do = "run gpulock install sge or slurm"
        return settings, [warning(f"no {path}: all defaults", do, name)]
    wrong = [
        fault(what, f"{_MEND}; then: systemctl reload gpulockd", name) for what in settings.faults
    ]
    wrong += [fault(what, f"correct it in {path}", name) for what in find_setting_faults(settings)]
    return settings, wrong or [ok(str(path), name)]


def node_checks(settings: Settings) -> list[Check]:
    """Return the checks of the node itself."""
    return run_all(
        {
            "LOCK_DIR": lambda: check_lock_dir(settings),
            "STATE_DIR": lambda: check_state_dir(settings),
            "boot": lambda: check_boot_locks(settings),
            "driver": lambda: check_driver_devices(settings),
            "SHARES": lambda: check_shares(settings),
            "MIG": lambda: check_held_parts(settings),
            "SHARE_MPS": lambda: check_mps(settings),
        }
    )


def check_lock_dir(settings: Settings) -> Iterator[Check]:
    """Look at both folders of locks and records, and at the gate's mode."""
    store = LockStore(settings.lock_dir)
    folders = [path for path in (store.path, store.root) if os.path.lexists(path)]
    if not folders:
        yield ok(f"{store.path} is not there yet: the first claim makes it")
        return
    checks = [check_lock_folder(path) for path in folders]
    yield from checks
    if all(check.state == OK for check in checks):
        yield from check_locks_readable(store)
        gate = Path(store.root, "gate")
        mode = stat.S_IMODE(gate.stat().st_mode) if gate.exists() else _GATE_MODE
        if mode != _GATE_MODE:
            what = f"{gate} has mode {mode:04o}: any user can block it"
            yield fault(what, f"chmod 600 {shlex.quote(str(gate))}", "gate")


def check_lock_folder(path: str) -> Check:
    """Look at owner, mode and file system of one folder."""
    try:
        check_folder(path, make=False)
    except Refusal as refusal:
        return fault(refusal.why, refusal.do)
    kind = boot.file_system_type(path)
    if bad := boot.why_not_local(path, kind):
        return fault(*bad)
    if why := why_unwritable(path):
        return fault(f"{path} cannot be written: {why}", "make room, or mount it read-write")
    return ok(f"{path} on {kind}")


def check_locks_readable(store: LockStore) -> Iterator[Check]:
    """Name each lock that nobody can read: no reap frees it. Tell of those dropped unwritten."""
    found = store.read_all_locks() if store.exists() else {}
    for name, lock in found.items():
        path = f"{store.locks_dir}/{name}"
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            what = f"{path} is no directory: its device is never granted"
            yield fault(what, f"rm {shlex.quote(path)}", "locks")
        elif lock.fault:
            yield fault(f"{name}: {lock.fault}", f"run gpulock why {name}", "locks")
    if lost := read_history_dropped(store):
        what = (
            f"the history lacks {lost} claims of this boot: more than {FINISHED_CAP} waited for it"
        )
        yield warning(what, "let gpulockd run: it writes a line for each claim", "history")


def why_unwritable(path: str) -> str:
    """Return why no file can be written in a folder, or nothing."""
    try:
        atomic.replace_file(f"{path}/.doctor", b"x" * 512)
        os.unlink(f"{path}/.doctor")
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def check_state_dir(settings: Settings) -> Iterator[Check]:
    """Look at owner and mode of STATE_DIR."""
    path = Path(settings.state_dir)
    try:
        info = path.stat()  # a link to another disk is right
    except FileNotFoundError:
        info = None
    if info is None and path.is_symlink():
        yield fault(f"{path} is a link that leads nowhere", "mount what it leads to")
    elif info is None:
        yield ok(f"{path} is not there yet: the first claim makes it")
    elif not stat.S_ISDIR(info.st_mode):
        yield fault(f"{path} is no directory", "remove it")
    elif info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"{path} has uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}"
        name = shlex.quote(str(path))
        yield fault(what, f"chown {os.geteuid()} {name}; chmod 755 {name}")
    elif why := why_unwritable(str(path)):
        yield fault(f"{path} cannot be written: {why}", "make room, or mount it read-write")
    else:
        yield ok(str(path))
    mark = path / LOST_MARK
    gone = not (path / QUARANTINE).is_dir() and is_of_this_boot(settings)
    if gone or mark.exists():
        do = f"quarantine again what was out of service, then: rm -f {shlex.quote(str(mark))}"
        yield fault(f"{path / QUARANTINE}{LOST}", do, "quarantine")


def is_of_this_boot(settings: Settings) -> bool:
    """Return whether claims of this boot may have been made."""
    node = Node(settings)
    return node.store.boot_id() == node.boot_id


def check_boot_locks(settings: Settings) -> Iterator[Check]:
    """Look whether records and locks of this boot are all there."""
    node = Node(settings)
    try:
        ours = node.store.boot_id()
    except Refusal as refusal:
        path = shlex.quote(f"{node.store.root}/boot_id")
        kept = shlex.quote(f"{settings.state_dir}/boot_id")
        yield fault(f"{refusal.why}: nothing is granted", f"rm -r {path}; cp {kept} {path}")
        return
    if ours == node.boot_id:
        yield ok("the records are of this boot")
        yield from check_records_readable(node.store)
        yield from check_removed_locks(node.store, node.boot_id)
    elif boot.may_be_claimed_boot(settings.state_dir, node.boot_id):
        lost = lost_records_refusal(node.store.root)
        yield fault(f"{lost.why}: nothing is granted", lost.do)
    else:
        yield ok("nothing was claimed since this boot")


def check_records_readable(store: LockStore) -> Iterator[Check]:
    """Name each record at which every claim stops: it cannot be read, nor be written back."""
    for token, why in find_unreadable_records(store).items():
        what = f"the record of claim {token} cannot be read ({why}): nothing is granted"
        path = shlex.quote(f"{store.claims_dir}/{token}")
        yield fault(what, f"once no job is left: rm -r {path}", "locks")


def check_removed_locks(store: LockStore, boot_id: str) -> Iterator[Check]:
    """Tell which locks or records somebody removed, of claims that have the other.

    Without the gate that is also seen of a claim that is made or released: not twice.
    """
    removed = find_removed_locks(store, boot_id)
    if removed:
        time.sleep(_PAUSE)
        removed &= find_removed_locks(store, boot_id)
    for name, _ in sorted(removed):
        what = f"the lock or the record of {name} was removed: the claim holds it all the same"
        yield warning(what, "the next claim puts it back, or gpulock reap", "locks")


def find_removed_locks(store: LockStore, boot_id: str) -> set[tuple[str, str]]:
    """Return (device, token) where either lock or record is gone; raise Refusal."""
    return {
        (name, lock.owner.token)
        for name, lock in store.read_all_locks().items()
        if lock.owner
        and lock.owner.boot_id == boot_id
        and not (
            os.path.lexists(f"{store.locks_dir}/{name}/owner")
            and os.path.lexists(f"{store.claims_dir}/{lock.owner.token}/{RECORD}")
        )
    }


def check_driver_devices(settings: Settings) -> Iterator[Check]:
    """Look at the devices the driver shows, their number, their nodes in /dev, their UUIDs."""
    try:
        found = devices.read_devices(settings.driver_root, settings.sys_root)
    except Refusal as refusal:
        yield fault(refusal.why, refusal.do)
        return
    yield check_gpu_number(settings.expected_gpus, len(found))
    for device in found:
        if device.fault:
            yield fault(f"{device.id}: {device.fault}", "look at dmesg and the card")
    yield from check_device_nodes(settings, [d for d in found if not d.fault])
    if any(not device.uuid for device in found):
        what = "the driver does not list all UUIDs yet:"
        what += " containers and VISIBLE_DEVICES=uuid lack them"
        state = fault if settings.visible_devices == "uuid" else warning
        yield state(what, "run nvidia-persistenced", "UUIDs")


def check_shares(settings: Settings) -> Iterator[Check]:
    """Tell which cards have places, whose they are at a time, and what waits for held ones."""
    node = Node(settings)
    held = node.store.read_all_locks() if node.store.exists() else {}
    places = count_places_by_card(node.devices() if settings.shares else [], settings.shares)
    for word in settings.shares:
        if not count_places_by_card(node.devices(), (word,)):
            what = f"{word} names no card here, or one in MIG mode: it gives no shares"
            yield warning(what, "correct SHARES; gpulock inventory names the cards")
    if places:
        names = ", ".join(f"{name} has {number} places" for name, number in places.items())
        if settings.share_users == "many":
            what = f"{names}, for several users at a time: nothing fences their memory"
            yield warning(what, "set SHARE_USERS=one, unless they trust each other")
        else:
            yield ok(f"{names}, for one user at a time")
    waiting: dict[tuple[str, str], list[Owner]] = {}
    for name, lock in sorted(held.items()):
        card, share, _ = name.partition(SHARE)
        if share and lock.owner and lock.owner.places not in (0, places.get(card, 0)):
            waiting.setdefault((card, lock.owner.token), []).append(lock.owner)
    for (card, _), owners in waiting.items():
        part = f"{len(owners) if len(owners) > 1 else 'one'} of {owners[0].places} places of {card}"
        what = f"{owners[0].job()} holds {part}, SHARES says {places.get(card, 0)}"
        yield warning(f"{what}: that counts when it ends")
    for card in places if settings.share_users == "one" else ():
        owners = [one.owner for one in shares_of_card(card, held) if one.owner]
        if len({owner.uid for owner in owners}) > 1:
            names = " and ".join(sorted({owner.user for owner in owners}))
            what = f"{names} share {card}, SHARE_USERS says one"
            yield warning(f"{what}: that counts when one is left")


def check_held_parts(settings: Settings) -> Iterator[Check]:
    """Tell of claims from before the MIG mode of their card was changed."""
    node = Node(settings)
    shown = node.devices_if_driver() if node.store.exists() else []
    split, cards = {d.parent for d in shown}, {d.bus for d in shown}
    known = {device.id for device in shown}
    for name, lock in sorted((node.store.read_all_locks() if cards else {}).items()):
        card = devices.card_bus_id(name)
        who = lock.owner.job() if lock.owner else "a lock without a readable owner"
        if ".gi" in name and name not in known and card in cards:
            what = f"{who} holds {name}, which is not shown now"
        elif ".gi" not in name and card in split:
            what = f"{who} holds {name}, which is in MIG mode now"
        else:
            continue
        yield warning(f"{what}: that counts when it ends", "gpulock inventory")


def check_mps(settings: Settings) -> Iterator[Check]:
    """Tell what keeps gpulockd from starting MPS, and the MPS that does not end."""
    if not settings.share_mps:
        return
    program, node = settings.mps_control, Node(settings)
    if not settings.shares:
        yield warning("no card has places, so that none has an MPS", "set SHARES, or SHARE_MPS=no")
    if not os.access(program, os.X_OK):
        what = f"{program} is no program: each job that asks for a share is sent back"
        yield fault(what, "install the driver's MPS, or set MPS_CONTROL or SHARE_MPS=no")
    try:
        check_above_mps_dir(settings.mps_dir)
    except (MpsError, OSError) as wrong:
        what = f"no card gets an MPS: {one_line(str(wrong))}"
        yield fault(what, "set MPS_DIR below a folder that only root may write")
    try:
        version = loaded_driver_version(settings.driver_root)
    except Refusal:
        version = ""
    if version and int(version.partition(".")[0]) < MPS_MEMORY_DRIVER:
        what = f"MPS of driver {version} does not limit the memory of a place"
        yield warning(what, f"use driver {MPS_MEMORY_DRIVER} or newer")
    locks = node.store.read_all_locks() if node.store.exists() else {}
    held = {name.partition(SHARE)[0] for name in locks}
    for card in cards_with_mps(settings, node.boot_id, None):
        if card not in held:
            what = f"the MPS of {card} has not ended: the card is closed until then"
            yield warning(what, "look again in a minute; then see journalctl -u gpulockd")
    yield ok(f"MPS serves one user a card, below {settings.mps_dir}")


def check_gpu_number(wanted: int, there: int) -> Check:
    """Compare the number of GPUs with EXPECTED_GPUS; pure."""
    name = "EXPECTED_GPUS"
    if not wanted:
        what = f"not set: a card that falls out ({there} are there) is not missed"
        return warning(what, f"set EXPECTED_GPUS={there} in the settings", name)
    if wanted > there:
        do = "look at dmesg and the cards; lower EXPECTED_GPUS if one was taken out"
        return fault(f"{there} of {wanted} GPUs are there", do, name)
    if wanted < there:
        return warning(f"{there} GPUs are there, not {wanted}", "correct EXPECTED_GPUS", name)
    return ok(f"all {wanted} are there", name)


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
        yield fault("; ".join(bad), "run nvidia-modprobe -u -c0, or nvidia-smi as root", name)
    else:
        yield ok(f"{len(found)} below {settings.dev_root}", name)


def others_may_link_in(folder: str, proc_root: str) -> bool:
    """Return whether links that others make in a folder lead a program of root's elsewhere.

    The kernel keeps root from following them where the folder is sticky (proc(5)).
    """
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        return False
    try:
        guarded = Path(proc_root, "sys/fs/protected_symlinks").read_text().strip() != "0"
    except FileNotFoundError:
        guarded = False
    return bool(mode & 0o022) and not (guarded and mode & stat.S_ISVTX)
