# SPDX-License-Identifier: Apache-2.0
"""The boot rule: records belong to one boot, and must not be lost within it.

Hot. The boot id stands beside the records and in STATE_DIR. Beside the records: go on. Only in
STATE_DIR: the records of running jobs were lost with their folder. Garbage there: they may be. Then
nothing is granted until a person has looked (`gpulock forget-locks`). Neither: the first claim or
reconcile of a boot makes ready. One that cannot be read refuses the claim.
"""

import errno
import os
import time

from gpulock.errors import BROKEN, UNKNOWN, Refusal, one_line, os_error_kind
from gpulock.store import atomic, event_kinds, grants, quarantine
from gpulock.store.kv import int_or_zero
from gpulock.store.locks import LockStore, list_names
from gpulock.store.owner import Owner
from gpulock.store.repair import NO_CLAIM

BOOT_ID_LENGTH, BOOT_ID_LETTERS = 36, "0123456789abcdef-"
ROOM, INODES = 1 << 16, 16  # bytes and files without which a claim may find no room in LOCK_DIR
MOUNTS_LIMIT = 1 << 26  # bytes: users mount too
NO_MOUNT = "unknown"  # a folder that no line of mountinfo covers


def prepare_boot(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
    """Let claims go on in this boot, gate held; raise Refusal when records were lost."""
    if store.boot_id() == boot_id:
        return
    if lost := lost_records_refusal(store, state_dir, boot_id):
        raise lost
    begin_boot(store, state_dir, boot_id, node)


def begin_boot(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
    """Make all folders ready for this boot, gate held; raise Refusal.

    Also for a person who knows that no job is left. Claims whose records are still there go on.

    The boot id is written beside the records first, then durably into STATE_DIR, and no record of a
    job comes before that. In another order one kill would close the node.
    """
    check_file_systems(store)
    make_claim_folders(store, state_dir, boot_id)
    atomic.remove_quietly(f"{store.path}/{event_kinds.EVENTS}")  # they begin anew
    try:
        finish_earlier_claims(store, boot_id)
        grants.drop_oldest(
            store, f"{state_dir}/{grants.OWED}", grants.OWED_CAP + 1, grants.OWED_CAP
        )
        restore_reserves(store, state_dir, boot_id, node)
        atomic.replace_file(f"{store.root}/boot_id", boot_id.encode() + b"\n")
        write_boot_id(f"{state_dir}/boot_id", boot_id.encode() + b"\n")
    except OSError as fault:
        raise unwritable_refusal(fault) from fault


def check_file_systems(store: LockStore) -> None:
    """Raise Refusal where mkdir, rename or flock may not be atomic."""
    for path in (store.path, store.root):
        try:
            kind = file_system_type(f"{path}/.")
        except (OSError, IndexError) as fault:
            why = f"the file system of {path} cannot be seen: {fault}"
            raise Refusal(UNKNOWN, why, "run gpulock doctor") from fault
        if bad := why_not_local(path, kind):
            raise Refusal(BROKEN, *bad)


def finish_earlier_claims(store: LockStore, boot_id: str) -> None:
    """Finish claims of earlier boots, on folders that outlived one; raise OSError, Refusal.

    What a power cut left of them cannot be read, and is removed. Of this boot's claims those with a
    record go on, and other locks are removed.
    """
    kept: set[str] = set()
    for token in os.listdir(store.claims_dir):
        try:
            text = store.read_record(token)
        except OSError as fault:
            if fault.errno not in (errno.ENOENT, *NO_CLAIM):
                raise
            text = ""
        if f"\nboot_id={boot_id}\n" in text:
            kept.add(token)  # a reserve where a kill cut this short; by forget-locks a job's too
        elif text and token[0] != "." and "\nscheduler=admin\n" not in text:
            grants.finish_claim(store, token)
        else:
            atomic.remove_folder(f"{store.claims_dir}/{token}")
    for name in list_names(store.locks_dir):
        record = store.read(name).owner
        if record is None or record.token not in kept:
            grants.remove_lock(store, name)


def unwritable_refusal(fault: OSError) -> Refusal:
    """Return the refusal where LOCK_DIR, the records' folder or STATE_DIR takes nothing."""
    why = f"this node's state cannot be written: {fault}"
    return Refusal(os_error_kind(fault), why, "see gpulock doctor")


def write_boot_id(path: str, data: bytes) -> None:
    """Write STATE_DIR's boot id, on a full disk into the file of an earlier boot; raise OSError.

    It is durable: what is neither this boot's id nor an earlier one's was left by no power cut.
    """
    try:
        atomic.replace_file(path, data, durable=True)
    except OSError as fault:
        if fault.errno not in atomic.FULL:
            raise
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:  # in place and of the same length: that needs no room
            if os.fstat(fd).st_size != len(data):
                raise
            atomic.write_descriptor(fd, data)
        finally:
            os.close(fd)


def make_claim_folders(store: LockStore, state_dir: str, boot_id: str) -> None:
    """Make the folders that every claim lists, gate held; raise Refusal.

    Where STATE_DIR was emptied within this boot a file says so: nobody knows what was out of
    service. Its boot id is put back, without which the records could be lost unseen.
    """
    noted = f"{state_dir}/{quarantine.FOLDER}"
    try:
        lost = not os.path.isdir(noted) and store.boot_id() == boot_id
        ours = (store.locks_dir, store.claims_dir, store.finished_dir)
        for folder in (state_dir, *ours, noted):
            atomic.mkdir_if_missing(folder)
        if lost:
            atomic.replace_file(f"{state_dir}/{quarantine.LOST_MARK}", b"")
            write_boot_id(f"{state_dir}/boot_id", boot_id.encode() + b"\n")
    except OSError as fault:
        raise unwritable_refusal(fault) from fault


def restore_reserves(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
    """Lock again what an administrator has reserved; raise OSError or Refusal."""
    for device in quarantine.list_noted_devices(state_dir, quarantine.RESERVE):
        note = quarantine.read_device_note(state_dir, quarantine.RESERVE, device)
        if store.read(device).owner is None:
            grants.make_claim(store, reserve_owner(device, note, boot_id, node))


def reserve_owner(device: str, note: dict[str, str], boot_id: str, node: str) -> Owner:
    """Return the owner record of an administrator's lock."""
    return Owner(
        scheduler="admin",
        cluster="admin",
        node=node,
        job_id=device,
        user=one_line(note.get("by", "root")),
        uid=os.geteuid(),
        boot_id=boot_id,
        claimed_at=float(int_or_zero(note.get("at", ""))),
        claimed_boottime=time.clock_gettime(time.CLOCK_BOOTTIME),
        token=os.urandom(8).hex(),
        devices=(device,),
        comment=one_line(note.get("reason", "")),
    )


def lost_records_refusal(store: LockStore, state_dir: str, boot_id: str) -> "Refusal | None":
    """Return the refusal of every claim where the records of this boot were lost, or may be.

    STATE_DIR's boot id says it, and the records' own is not this boot's. Raises Refusal.
    """
    try:
        known = atomic.read_text(f"{state_dir}/boot_id").strip()
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise Refusal(UNKNOWN, f"STATE_DIR: {fault}", "look at STATE_DIR") from fault
    if known == boot_id:
        what = "not this boot's" if store.boot_id() else "gone"
        why = f"the records of this boot's claims were lost: {store.root}/boot_id is {what}"
    elif len(known) != BOOT_ID_LENGTH or known.strip(BOOT_ID_LETTERS):
        why = f"the records of this boot's claims may be lost: {state_dir}/boot_id is garbage"
    else:
        return None
    do = "drain the node, then run gpulock forget-locks when no job is left"
    return Refusal(UNKNOWN, why, do)


def why_not_local(path: str, kind: str) -> "tuple[str, str] | None":
    """Return why a folder may not be on a kind of file system and what to do, or None; pure."""
    if kind in atomic.LOCAL_FILE_SYSTEMS:
        return None
    if kind == NO_MOUNT:
        why = f"no mount covers {path}, as in a chroot: its file system is not known"
        return why, "bind the chroot's root to itself, or mount a tmpfs there"
    return f"{path} is on {kind}", "mount a tmpfs there"


def is_full(path: str) -> bool:
    """Return whether a file system has hardly any room left; False for one that cannot be asked."""
    try:
        room = os.statvfs(path)
    except OSError:
        return False
    if room.f_blocks and room.f_bfree * room.f_frsize < ROOM:
        return True
    return bool(room.f_files and room.f_ffree < INODES)


def file_system_type(path: str, proc_root: str = "/proc") -> str:
    """Return the type of the file system `path` is on, as /proc/self/mountinfo names it.

    By mount id (fdinfo), which also tells btrfs and overlay mounts apart; Python does not offer
    statfs(2).
    """
    fd = os.open(path, atomic.OPEN_DIRECTORY)
    try:
        info = atomic.read_text(f"{proc_root}/self/fdinfo/{fd}")
    finally:
        os.close(fd)
    mount = info.partition("mnt_id:")[2].split(None, 1)[0]
    for line in atomic.read_text(f"{proc_root}/self/mountinfo", MOUNTS_LIMIT).split("\n"):
        if line.partition(" ")[0] == mount:  # users mount too, at paths of any length
            return line.partition(" - ")[2].split(None, 1)[0]
    return NO_MOUNT
