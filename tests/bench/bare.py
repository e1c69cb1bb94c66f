# SPDX-License-Identifier: Apache-2.0
"""The floor of a claim and its release: their system calls alone, by the same interpreter."""

from __future__ import annotations

import fcntl
import os
import shutil

from gpulock.node.context import Node

NAMES = ("bare0", "bare1")


def bare(node: Node) -> None:
    """Make the system calls of a claim of 2 devices and of its release, and nothing else.

    Those of the locks themselves: neither the driver's files nor other processes are looked at.
    """
    store, state = node.store, node.settings.state_dir
    locks = [f"{store.locks_dir}/{name}" for name in NAMES]
    text = b"x" * 400
    for act in ("claim", "release"):
        os.lstat(store.path)
        gate = os.open(f"{store.path}/gate", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.lstat(f"{store.path}/gate")
        os.listdir(store.locks_dir)
        if act == "claim":
            read(f"{store.path}/boot_id")
            read(f"{store.path}/totals")
            os.listdir(f"{state}/quarantine")
            os.listdir(f"{state}/reserves")
            os.path.exists(f"{store.path}/lost")
            for lock in locks:
                os.mkdir(lock)
                replace(f"{lock}/owner", text)
            replace(f"{store.path}/bare", text)
        else:
            for lock in locks:
                read(f"{lock}/owner")  # to find whose it is
                os.listdir(lock)
                read(f"{lock}/owner")  # to see, the gate held, that it still is
                os.rename(lock, f"{store.released_dir}/{os.path.basename(lock)}")
                write(f"{store.released_dir}/{os.path.basename(lock)}/released", text[:40])
                os.stat(store.released_dir)
        os.close(gate)


def clear(node: Node) -> None:
    """Take away what `bare` released."""
    for name in NAMES:
        shutil.rmtree(f"{node.store.released_dir}/{name}")


def read(path: str) -> None:
    """Read a small file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.fstat(fd)
    os.read(fd, 4096)
    os.close(fd)


def write(path: str, data: bytes) -> None:
    """Write a new file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    os.write(fd, data)
    os.close(fd)


def replace(path: str, data: bytes) -> None:
    """Write a file beside and rename it in."""
    write(f"{path}.new", data)
    os.chmod(f"{path}.new", 0o644)
    os.rename(f"{path}.new", path)
