# SPDX-License-Identifier: Apache-2.0
"""Faults of a lab's node, for a while: of its driver, of the folders of gpulock."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator

from tests.labs.common.installed import Installed, mount, mounted

SMALL = ("-t", "tmpfs", "-o", "mode=755,size=64k", "small")


@contextlib.contextmanager
def without_driver(gpus: Installed, node: str) -> Generator[None]:
    """Let no driver be loaded."""
    tree = gpus.drivers / node / "proc/driver/nvidia"
    tree.rename(tree.with_name("gone"))
    try:
        yield
    finally:
        tree.with_name("gone").rename(tree)


@contextlib.contextmanager
def without_a_card(gpus: Installed, node: str) -> Generator[None]:
    """Let one card have fallen off the bus."""
    card = max((gpus.drivers / node / "proc/driver/nvidia/gpus").iterdir())
    gone = card.parent.with_name("gone")
    card.rename(gone)
    try:
        yield
    finally:
        gone.rename(card)


@contextlib.contextmanager
def with_a_users_lock_dir(gpus: Installed, node: str) -> Generator[None]:
    """Let LOCK_DIR be another user's."""
    place = str(gpus.cluster.path_in(node, "/run/gpulock"))
    shutil.chown(place, 27012, 27012)
    try:
        yield
    finally:
        shutil.chown(place, 0, 0)


@contextlib.contextmanager
def with_a_read_only_lock_dir(gpus: Installed, node: str) -> Generator[None]:
    """Let LOCK_DIR be read-only."""
    with mounted(gpus, node, "/run/gpulock", *SMALL):
        mount(gpus, node, "-o", "remount,ro", "/run/gpulock")
        yield


@contextlib.contextmanager
def with_a_read_only_state_dir(gpus: Installed, node: str) -> Generator[None]:
    """Let STATE_DIR be read-only."""
    with mounted(gpus, node, "/var/lib/gpulock", "-t", "tmpfs", "-o", "ro", "state"):
        yield


@contextlib.contextmanager
def with_a_full_lock_dir(gpus: Installed, node: str) -> Generator[None]:
    """Let LOCK_DIR have no room."""
    with mounted(gpus, node, "/run/gpulock", *SMALL):
        fill(gpus, node, "/run/gpulock")
        yield


@contextlib.contextmanager
def with_a_full_state_dir(gpus: Installed, node: str) -> Generator[None]:
    """Let it be on a disk of its own, with what it has, and no room for more."""
    here, copy = "/var/lib/gpulock", str(gpus.cluster.lab / "state-dir")
    shutil.copytree(gpus.cluster.path_in(node, here), copy)
    try:
        with mounted(gpus, node, here, *SMALL):
            copied = gpus.cluster.run_in(node, ["cp", "-a", f"{copy}/.", here])
            assert copied.returncode == 0
            fill(gpus, node, here)
            yield
    finally:
        shutil.rmtree(copy)


def fill(gpus: Installed, node: str, folder: str) -> None:
    """Leave no room in a folder of a node."""
    line = ["dd", "if=/dev/zero", f"of={folder}/fill", "bs=4k"]
    assert "No space left" in gpus.cluster.run_in(node, line).stderr
