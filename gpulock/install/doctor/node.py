# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on every node: settings, directories, boot, driver, device nodes."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from gpulock.alloc.shares import shares_of_card
from gpulock.daemon.mps.folder import MpsError, check_above_mps_dir
from gpulock.errors import Refusal, one_line
from gpulock.install.doctor.check import Check, fault, ok, run_all, warning
from gpulock.install.doctor.claims import (
    check_boot_locks,
    check_lock_dir,
    is_of_this_boot,
    why_unwritable,
)
from gpulock.install.setting_faults import find_setting_faults
from gpulock.job.environment import loaded_driver_version
from gpulock.job.mps import cards_with_mps
from gpulock.node import devices
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.node.shares import count_places_by_card
from gpulock.store.owner import Owner
from gpulock.store.quarantine import LOST, LOST_MARK, QUARANTINE

_MEND = "correct the file, or upgrade gpulock here where the key is of a later version"
MPS_MEMORY_DRIVER = 495  # of CUDA 11.5, the first that limits memory (docs/facts/nvml.md, mps)


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
