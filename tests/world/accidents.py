# SPDX-License-Identifier: Apache-2.0
"""What happens to a node in the world: processes die, folders are lost, clocks are set."""

from __future__ import annotations

import os

from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.store import atomic, quarantine
from gpulock.workstation.process_claims import ensure_node_dirs
from tests.world.actors import Play
from tests.world.processes import Process
from tests.world.site import NAME, Site


def quarantined(device: str) -> Play:
    """Return an administrator who takes a device out of service, at any time."""

    def play(site: Site) -> None:
        kernel = site.kernel
        kernel.wait(lambda: os.path.isdir(f"{site.lock_dir}/locks"), "LOCK_DIR")

        def main() -> int:
            folder, node = quarantine.QUARANTINE, Node(site.settings, NAME)
            try:
                ensure_node_dirs(node)
            except Refusal as refusal:
                site.log.append(str(refusal))
                return 1
            quarantine.write_device_note(site.state_dir, folder, device, "root", "its fan died")
            return 0

        kernel.program(kernel.tree.spawn("gpulock"), main)

    return play


def straggler() -> Play:
    """Return the end of what a job left behind, at any time after its own."""

    def left(site: Site) -> list[Process]:
        return [one for one in site.kernel.tree.by_pid.values() if one.name == "straggler"]

    def play(site: Site) -> None:
        site.kernel.wait(lambda: left(site), "a straggler")
        for process in left(site):
            site.kernel.tree.end(process)

    return play


def shepherd_dies(name: str = "sge_shepherd") -> Play:
    """Return an accident: a daemon that stands for a job is killed."""

    def find(site: Site) -> list[Process]:
        return [one for one in site.kernel.tree.by_pid.values() if one.name == name]

    def play(site: Site) -> None:
        site.kernel.wait(lambda: find(site), f"a {name}")
        for process in find(site):
            site.kernel.kill(process)

    return play


def lock_dir_lost(inner: str = "") -> Play:
    """Return `rm -rf LOCK_DIR`, or of a folder in it, while jobs run."""

    def play(site: Site) -> None:
        site.kernel.wait(lambda: os.path.isdir(f"{site.lock_dir}/locks"), "LOCK_DIR")
        lose(site, f"{site.lock_dir}{inner}")

    return play


def records_lost() -> Play:
    """Return `rm -rf` of all records there are, one after the other, while jobs run."""

    def play(site: Site) -> None:
        folder = f"{site.records}/claims"
        site.kernel.wait(lambda: os.path.isdir(folder) and os.listdir(folder), "a record")
        site.lost = True
        lose(site, *[f"{folder}/{name}" for name in sorted(os.listdir(folder))])

    return play


def all_lost(both: bool = True) -> Play:
    """Return `rm -rf` of the folder of the records, with `both` after that of LOCK_DIR."""

    def play(site: Site) -> None:
        site.kernel.wait(lambda: os.path.isdir(f"{site.lock_dir}/locks"), "LOCK_DIR")
        site.closed = True
        run_rm(site, *([site.lock_dir] if both else []), site.records)

    return play


def lose(site: Site, *paths: str) -> None:
    """Remove what the next reconcile puts back, if it begins after that."""
    site.losing += 1
    site.losses += 1
    run_rm(site, *paths)
    site.losing -= 1


def run_rm(site: Site, *paths: str) -> None:
    """Run rm(1), each of its calls one step."""

    def main() -> int:
        for path in paths:
            try:
                remove_all(site, path)
            except OSError:
                continue
        return 0

    site.kernel.program(site.kernel.tree.spawn("rm"), main)


def remove_all(site: Site, path: str) -> None:
    """Remove a folder as rm(1) does: what came meanwhile keeps it."""
    calls = site.kernel.os
    for name in calls.listdir(path):
        inner = f"{path}/{name}"
        if os.path.isdir(inner):
            remove_all(site, inner)
        else:
            atomic.remove_quietly(inner)
    try:
        calls.rmdir(path)
    except OSError:
        return


def disk_full(*folders: str) -> Play:
    """Return a disk that is full for a while."""

    def play(site: Site) -> None:
        site.kernel.step("disk is full", " ".join(folders))
        site.short = True
        site.kernel.full = tuple(f"{site.root}/{name}" for name in folders)
        site.kernel.step("disk has room", " ".join(folders))
        site.kernel.full = ()

    return play


def clock_is_set(seconds: float) -> Play:
    """Return an administrator who sets the wall clock."""

    def play(site: Site) -> None:
        site.kernel.step("clock is set", f"{seconds:+g} s")
        site.kernel.wall += seconds

    return play


def reboot(keeps: bool = False) -> Play:
    """Return a node that goes down and comes up, LOCK_DIR on tmpfs, or with `keeps` on a disk."""

    def play(site: Site) -> None:
        kernel = site.kernel
        kernel.step("node boots", "")
        site.boot(keeps)

    return play


def pid_is_reused() -> Play:
    """Return an accident: a shepherd is killed, and a daemon that stays gets its number."""

    def find(site: Site) -> list[Process]:
        return [one for one in site.kernel.tree.by_pid.values() if one.name == "sge_shepherd"]

    def play(site: Site) -> None:
        kernel = site.kernel
        kernel.wait(lambda: find(site), "a shepherd")
        for process in find(site)[:1]:
            kernel.kill(process)
            kernel.now += 5.0  # all other numbers were given out meanwhile
            site.others.add(kernel.tree.spawn("sshd", process.pid))

    return play
