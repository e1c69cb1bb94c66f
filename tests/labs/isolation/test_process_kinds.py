# SPDX-License-Identifier: Apache-2.0
"""A release sees the owner's processes of every kind, among all that this machine runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpulock.alloc import device_users
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.devices import Device
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings

pytestmark = pytest.mark.lab
OWNER, OTHER = 64_001, 64_002
DEVICE, FULL = "0000:3b:00.0", 7  # /dev/full stands for a GPU's node
# processes of one kind each: they say so, and live until they are told to end
HEAD = """\
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
CLONE_FILES, CLONE_NEWPID, CLONE_NEWUSER = 0x400, 0x20000000, 0x10000000
def become(uid):
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
def ready():
    print(os.getpid(), flush=True); sys.stdin.read(); os._exit(0)
def hold():
    globals()["kept"] = open("/dev/full")
"""
SCENES = {
    "holds the device": "become({owner}); hold(); ready()",
    "holds nothing": "become({owner}); ready()",
    "another user's": "become({other}); hold(); ready()",
    "of the owner by its saved uid": "os.setresuid({other}, {other}, {owner}); hold(); ready()",
    "of another by its effective uid": "os.setresuid({owner}, {other}, {other}); hold(); ready()",
    "root's": "hold(); ready()",
    "leader over, thread goes on": """become({owner}); hold()
threading.Thread(target=ready).start(); libc.syscall({exit}, 0)""",
    "thread has its own files": """become({owner})
def own():
    libc.unshare(CLONE_FILES); hold(); ready()
threading.Thread(target=own).start()""",
    "in a pid namespace": """libc.unshare(CLONE_NEWPID)
if os.fork(): os.wait(); os._exit(0)
become({owner}); hold(); ready()""",
    "in a user namespace": "become({owner}); libc.unshare(CLONE_NEWUSER); hold(); ready()",
    "with a zombie": """become({owner}); hold()
if not os.fork(): os._exit(0)
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT); ready()""",
}
EXIT = {"x86_64": 60, "aarch64": 93, "ppc64le": 1}  # exit(2) of one thread


@pytest.fixture
def scenes() -> Iterator[dict[str, int]]:
    """Give a process of each kind, by its pid as this namespace has it."""
    keys = {"owner": OWNER, "other": OTHER, "exit": EXIT[os.uname().machine]}
    made: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, text in SCENES.items():
            made[name] = subprocess.Popen(
                [sys.executable, "-IS", "-c", HEAD + text.format(**keys)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        for name, process in made.items():
            assert process.stdout is not None and process.stdout.readline().strip(), name
        yield {name: process.pid for name, process in made.items()}
    finally:
        for process in made.values():
            process.communicate("")


def test_a_look_sees_each_kind_of_process(
    scenes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not seen are two users who work together (docs/hand-over.md)."""
    monkeypatch.setattr(device_users, "MAJOR", 1)
    scan = ProcessScan(Proc())
    scan.restrict({OWNER: ""})
    card = Device(DEVICE, 0)
    card.minor = FULL
    files = OpenFiles(scan, [card], Settings({}))
    holders = files.pids_with_open(DEVICE, OWNER)
    assert (scan.blind, files.blind) == ("", "")
    names = {name for name, pid in scenes.items() if pid in holders}
    assert names == {
        "holds the device",
        "leader over, thread goes on",
        "in a user namespace",
        "thread has its own files",
        "with a zombie",
    }
    assert scenes["another user's"] not in scan.statuses()
    assert {scenes["holds nothing"], scenes["root's"]} <= {*scan.statuses()}
