# SPDX-License-Identifier: Apache-2.0
"""This machine's kernel lists the same processes by BPF as by /proc, whatever they do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.alloc import device_users, process_scan
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.core import process_lister
from gpulock.node import process_list
from gpulock.node.devices import Device
from gpulock.node.process_list import NAME, read_process_list
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings

pytestmark = pytest.mark.lab
OWNER, OTHER = 64_001, 64_002
DEVICE, FULL = "0000:3b:00.0", 7  # /dev/full stands for a GPU's node
LOOKS = 2000
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
# a process whose threads take over its number, as fast as they can
TAKES_OVER = r"""
#include <pthread.h>
#include <unistd.h>
static char **words;
static void *over(void *_) { execv(words[0], words); _exit(1); }
int main(int n, char **argv) {
    pthread_t t; words = argv; alarm(120);
    if (pthread_create(&t, 0, over, 0)) return 1;
    for (;;) pause();
}
"""


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Pin the list below a bpffs of its own; let every look use it."""
    top = tmp_path / "bpf"
    top.mkdir()
    subprocess.run(["mount", "-t", "bpf", "-o", "mode=0700", "bpf", str(top)], check=True)
    try:
        folder = str(top / "gpulock")
        assert process_lister.ensure_process_list(Settings({}), folder) == ""
        monkeypatch.setattr(process_scan, "CROWD", 1)
        monkeypatch.setattr(device_users, "MAJOR", 1)
        yield folder
    finally:
        subprocess.run(["umount", str(top)], check=True)


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


def look(proc: Proc) -> tuple[set[int], set[int], list[int]]:
    """Return what a release sees of the owner: whom it reads, whom it leaves out, who holds."""
    scan = ProcessScan(proc)
    scan.restrict({OWNER: ""})
    card = Device(DEVICE, 0)
    card.minor = FULL
    files = OpenFiles(scan, [card], Settings({}))
    held = files.pids_with_open(DEVICE, OWNER)
    assert (scan.blind, files.blind) == ("", "")
    return {*scan.statuses()}, scan.others, sorted(held)


def test_a_look_by_the_list_is_that_by_proc(pins: str, scenes: dict[str, int]) -> None:
    told = read_process_list(pins)
    assert told is not None
    assert {*scenes.values()} <= {*told[0]}
    by_list, by_proc = look(Proc(pins=pins)), look(Proc(pins="/nowhere"))
    ours = {*scenes.values()}
    assert [seen & ours for seen in by_list[:2]] == [seen & ours for seen in by_proc[:2]]
    assert by_list[2] == by_proc[2]
    names = {name for name, pid in scenes.items() if pid in by_list[2]}
    assert {"holds the device", "leader over, thread goes on", "with a zombie"} <= names
    assert "another user's" not in names
    assert scenes["another user's"] in by_list[1]


def test_a_process_whose_number_a_thread_takes_over_is_in_every_list(
    pins: str, tmp_path: Path
) -> None:
    program = tmp_path / "takes_over"
    command = ["gcc", "-x", "c", "-", "-o", str(program), "-lpthread"]
    subprocess.run(command, input=TAKES_OVER, text=True, check=True)
    process = subprocess.Popen([str(program)])
    try:
        for number in range(LOOKS):
            told = read_process_list(pins)
            assert told is not None and process.pid in told[0], f"look {number}"
    finally:
        process.kill()
        process.wait()


def test_a_list_that_many_reads_bring_is_whole(
    pins: str, scenes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel hands out 32 KiB at a time, and goes on where it stopped."""
    for piece in (16, 40, 1000):
        monkeypatch.setattr(process_list, "PIECE", piece)
        told = read_process_list(pins)
        assert told is not None and {*scenes.values(), os.getpid()} <= {*told[0]}
        assert process_lister.find_listing_fault(Proc(pins=pins)) == ""


def test_a_user_reaches_no_list(pins: str) -> None:
    command = ["/bin/cat", f"{pins}/{NAME}"]
    assert subprocess.run(command, user=OTHER, capture_output=True, check=False).returncode != 0
