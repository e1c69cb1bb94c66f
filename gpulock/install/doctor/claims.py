# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR, the records beside it, and whether the two agree."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from gpulock.errors import Refusal, lost_records_refusal
from gpulock.install.doctor.check import Finding, fault, warning
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store import atomic, boot
from gpulock.store.event_log import count_dropped_claims
from gpulock.store.grants import FINISHED_CAP
from gpulock.store.locks import LockStore, check_folder

_GATE_MODE = 0o600  # a user who may open the gate can block the node


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
    """Name each lock that nobody can read: no reap frees it. Tell of those dropped unwritten."""
    held = store.read_all_locks()
    for name, lock in held.items():
        path = f"{store.locks_dir}/{name}"
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            what = f"{path} is no directory: its device is never granted"
            yield fault(what, f"rm {shlex.quote(path)}", "locks")
        elif lock.fault:
            yield fault(f"{name}: {lock.fault}", f"run gpulock why {name}", "locks")
    if lost := count_dropped_claims(store.path):
        what = (
            f"the history lacks {lost} claims of this boot: more than {FINISHED_CAP} waited for it"
        )
        yield warning(what, "let gpulockd run: it writes a line for each claim", "history")


def is_of_this_boot(settings: Settings) -> bool:
    """Return whether claims of this boot may have been made."""
    node = Node(settings)
    return node.store.boot_id() == node.boot_id


def check_boot_locks(settings: Settings) -> Iterator[Finding]:
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
        yield from check_records_readable(node.store)
    elif boot.may_be_claimed_boot(settings.state_dir, node.boot_id):
        lost = lost_records_refusal(node.store.root)
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
