# SPDX-License-Identifier: Apache-2.0
"""The floor of a claim and its release: their system calls alone, by the same interpreter."""

from __future__ import annotations

import fcntl
import os
import shutil

from gpulock.node.context import Node
from gpulock.store.gate import OPEN_PLACE

NAMES = ("bare0", "bare1")


def bare(node: Node) -> None:
    """Make the system calls of the locks of a claim of 2 devices and of its release, and no more.

    The driver's files and other processes are looked at by `bare_looks`.
    """
    store, state = node.store, node.settings.state_dir
    path, locks = store.path, [f"locks/{name}" for name in NAMES]
    text = b"x" * 400
    for act in ("claim", "release"):
        os.lstat(path)
        if act == "release":  # whose they are is found out before the gate
            os.stat(f"{path}/locks")
            os.listdir(f"{path}/locks")
            for lock in locks:
                read(f"{path}/{lock}/owner", None)
        place = os.open(path, OPEN_PLACE)
        gate = os.open("gate", os.O_RDWR | os.O_CLOEXEC, dir_fd=place)
        os.fstat(gate)
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.lstat(f"{path}/gate")
        if act == "claim":
            os.lstat(path)
            read("totals", place)
            read("boot_id", place)
            os.listdir(f"/proc/self/fd/{place}/locks")
            os.listdir(f"/proc/self/fd/{place}")
            os.listdir(f"{state}/quarantine")
            os.listdir(f"{state}/reserves")
            is_missing("lost", place)
            os.urandom(8)
            for lock in locks:
                os.mkdir(lock, dir_fd=place)
                replace(lock, "owner", text, place)
                os.link(f"{lock}/owner", f"{lock[6:]}.grant", src_dir_fd=place, dst_dir_fd=place)
            os.lstat(f"{path}/gate")
            is_missing("timeouts", place)
            is_missing("dropped", place)
            replace(".", "bare", text, place)
        else:
            for lock in locks:
                os.listdir(f"/proc/self/fd/{place}/{lock}")
                is_missing("none", place)  # a record in STATE_DIR
                read(f"{lock}/owner", place)  # to see, the gate held, that it still is
                write(f"{lock}/released", text[:65], place)
                os.unlink(f"{lock[6:]}.grant", dir_fd=place)
                os.rename(lock, f"released/{lock[6:]}", src_dir_fd=place, dst_dir_fd=place)
                os.stat(f"/proc/self/fd/{place}/released")
            os.lstat(f"{path}/gate")
        os.close(gate)
        os.close(place)


def bare_looks(node: Node) -> None:
    """Make the other system calls of a claim and its release, where /proc shows this process alone.

    A claim reads the driver's file of every device. A release looks at the nodes of its 2 devices,
    lists the processes twice, and reads this one's status and where its open files lead.
    """
    settings, proc = node.settings, node.proc.root
    is_missing(f"{settings.lock_dir}/inventory", None)
    gpus = f"{settings.driver_root}/gpus"
    for name in os.listdir(gpus):
        fd = os.open(f"{gpus}/{name}/information", os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 4096)
        os.close(fd)
    for number in range(2):
        os.stat(f"{settings.dev_root}/nvidia{number}")
    own = os.getpid()
    for listing in range(2):
        os.listdir(proc)
        folder = os.open(proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not listing:
            os.stat(f"{own}", dir_fd=folder)
        os.close(folder)
        if not listing:
            fd = os.open(f"{proc}/{own}/status", os.O_RDONLY | os.O_CLOEXEC)
            os.read(fd, 8192)
            os.close(fd)
            for name in os.listdir(f"{proc}/{own}/fd"):
                try:
                    os.readlink(f"{proc}/{own}/fd/{name}")
                except FileNotFoundError:
                    continue  # that of the listing


def clear(node: Node) -> None:
    """Take away what `bare` released."""
    for name in NAMES:
        shutil.rmtree(f"{node.store.released_dir}/{name}")


def is_missing(path: str, place: int | None) -> bool:
    """Return whether a file is missing, as those of rare events are."""
    try:
        os.stat(path, dir_fd=place)
    except FileNotFoundError:
        return True
    return False


def read(path: str, place: int | None) -> None:
    """Read a small file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=place)
    os.fstat(fd)
    os.read(fd, 4096)
    os.close(fd)


def write(path: str, data: bytes, place: int) -> None:
    """Write a new file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=place)
    os.write(fd, data)
    os.close(fd)


def replace(folder: str, name: str, data: bytes, place: int) -> None:
    """Write a file beside and rename it in."""
    beside = f"{folder}/.{name}.{os.urandom(6).hex()}"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
    os.write(fd, data)
    os.fchmod(fd, 0o644)
    os.close(fd)
    os.rename(beside, f"{folder}/{name}", src_dir_fd=place, dst_dir_fd=place)
