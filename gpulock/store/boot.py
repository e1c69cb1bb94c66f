# SPDX-License-Identifier: Apache-2.0
"""The boot rule: a lock directory belongs to one boot, and must not be lost within it.

Hot. The boot id stands in LOCK_DIR and in STATE_DIR. Both this boot's: go on. LOCK_DIR's missing
while STATE_DIR knows this boot, or has no boot id that can be read: the locks of running jobs were
lost, and nothing is granted until `gpulock reap` or gpulockd has put them back. Neither: the first
claim of a boot makes ready.
"""

import os
import time

from gpulock.errors import BROKEN, UNKNOWN, Refusal, lost_locks_refusal, one_line, os_error_kind
from gpulock.store import atomic, quarantine
from gpulock.store.kv import int_or_zero
from gpulock.store.locks import GRANT, LOST, LockStore
from gpulock.store.owner import Owner, is_cut_short

EMPTY = "empty"  # what STATE_DIR's boot id is read as where nothing is in its file
BOOT_ID_LENGTH, BOOT_ID_LETTERS = 36, "0123456789abcdef-"
ROOM, INODES = 1 << 16, 16  # bytes and files without which a claim may find no room in LOCK_DIR
NO_MOUNT = "unknown"  # a folder that no line of mountinfo covers
# file systems on which mkdir and rename are atomic and local (/proc/self/mountinfo names)
LOCAL_FILE_SYSTEMS = frozenset(
    ("tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay")
)


def prepare_boot(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
    """Let claims go on in this boot, gate held; raise Refusal when locks were lost."""
    if store.boot_id() == boot_id:
        return
    if may_be_claimed_boot(state_dir, boot_id):
        raise lost_locks_refusal("the locks of this boot")
    begin_boot(store, state_dir, boot_id, node)


def clear_folder(folder: str) -> None:
    """Remove the files of a folder as far as that is possible; they are never believed later."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        atomic.remove_quietly(f"{folder}/{name}")


def begin_boot(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
    """Make both directories ready for this boot, gate held.

    STATE_DIR's boot id is written first: a crash in between leads to an adoption too many, never
    to a grant too many. LOCK_DIR's is written last: until then nothing is granted.
    """
    try:
        kind = file_system_type(f"{store.root}/.")
    except (OSError, IndexError) as fault:
        raise Refusal(UNKNOWN, f"LOCK_DIR's file system: {fault}", "look at LOCK_DIR") from fault
    if bad := why_not_local(store.path, kind):
        raise Refusal(BROKEN, *bad)
    make_claim_folders(store, state_dir, boot_id)
    from gpulock.store import adoption_state, claim_records

    first = not may_be_claimed_boot(state_dir, boot_id)
    if first:
        remove_cut_locks(store)
        forget_earlier_grants(store, boot_id)
        clear_folder(f"{state_dir}/runs")  # of earlier boots: no process of theirs is left
        claim_records.limit_pending_records(state_dir, store)
        adoption_state.begin_adoption_state(state_dir)
    try:
        write_boot_id(f"{state_dir}/boot_id", boot_id.encode() + b"\n")
        if first:
            adoption_state.create_adoption_state(state_dir)
        if store.boot_id():
            atomic.remove_quietly(f"{store.root}/{LOST}")  # of an earlier boot, on a kept LOCK_DIR
        restore_reserves(store, state_dir, boot_id, node)
        atomic.replace_file(f"{store.root}/boot_id", boot_id.encode() + b"\n")
    except OSError as fault:
        raise unwritable_refusal(fault) from fault


def unwritable_refusal(fault: OSError) -> Refusal:
    """Return the refusal where LOCK_DIR or STATE_DIR takes nothing."""
    why = f"this node's state cannot be written: {fault}"
    return Refusal(os_error_kind(fault), why, "see gpulock doctor")


def forget_earlier_grants(store: LockStore, boot_id: str) -> None:
    """Let locks go that were lost in an earlier boot, on a kept LOCK_DIR.

    Raises Refusal, also where one was lost in this boot: then STATE_DIR has lost its boot id.
    """
    try:
        for name in store.find_lost(store.read_all_locks())[0]:
            text = atomic.read_text(f"{store.root}/{GRANT}{name}")
            if f"\nboot_id={boot_id}\n" in text:
                raise lost_locks_refusal(f"the locks of {name}")
            store.forget(name)
    except OSError as fault:
        raise Refusal(UNKNOWN, f"LOCK_DIR: {fault}", "look at LOCK_DIR") from fault


def remove_cut_locks(store: LockStore) -> None:
    """Remove the locks whose record a power cut left cut short, on a LOCK_DIR that was kept.

    They are of earlier boots, and otherwise stay for ever, since nobody can be proven dead. What
    cannot be removed stays.
    """
    for folder in (store.locks_dir, store.released_dir):
        try:
            for name in os.listdir(folder):
                try:
                    text = atomic.read_text(f"{folder}/{name}/owner")
                except FileNotFoundError:
                    continue
                if is_cut_short(text):
                    atomic.remove_folder(f"{folder}/{name}")
        except OSError:
            continue


def write_boot_id(path: str, data: bytes) -> None:
    """Write STATE_DIR's boot id, on a full disk into the file of an earlier boot; raise OSError.

    It is durable: what is neither this boot's id nor an earlier one's was left by no power cut.
    """
    try:
        atomic.replace_file(path, data, durable=True)
    except OSError as fault:
        if fault.errno not in atomic.FULL:
            raise
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:  # in place and of the same length: that needs no room
            if os.fstat(fd).st_size != len(data):
                raise
            atomic.write_descriptor(fd, data)
        finally:
            os.close(fd)


def make_claim_folders(store: LockStore, state_dir: str, boot_id: str) -> None:
    """Make the folders that every claim lists, gate held; raise Refusal.

    Where STATE_DIR was emptied within this boot a file says so: nobody knows what was out of
    service. Its boot id is put back, without which LOCK_DIR could be lost unseen.
    """
    noted = [f"{state_dir}/{name}" for name in (quarantine.QUARANTINE, quarantine.RESERVES)]
    try:
        lost = not all(map(os.path.isdir, noted)) and store.boot_id() == boot_id
        for folder in (state_dir, store.locks_dir, store.released_dir, *noted):
            if not os.path.isdir(folder):
                atomic.mkdir_if_missing(folder)
        if lost:
            atomic.replace_file(f"{state_dir}/{quarantine.LOST_MARK}", b"")
            write_boot_id(f"{state_dir}/boot_id", boot_id.encode() + b"\n")
    except OSError as fault:
        raise unwritable_refusal(fault) from fault


def mark_locks_lost(store: LockStore) -> None:
    """Note that locks of this boot were lost: from now on a device in use is not granted.

    A job whose shepherd was killed has no record to adopt, and its processes live on.
    """
    atomic.replace_file(f"{store.root}/{LOST}", b"locks of this boot were lost\n")


def restore_reserves(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
    """Lock again what an administrator reserved before this boot."""
    for device in quarantine.list_noted_devices(state_dir, quarantine.RESERVES):
        note = quarantine.read_device_note(state_dir, quarantine.RESERVES, device)
        record = reserve_owner(device, note, boot_id, node)
        try:
            store.make(device, record)
        except FileExistsError:
            held = store.read(device)
            if not held.fault and (held.owner is None or held.owner.boot_id != boot_id):
                store.rewrite(device, record)


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


def may_be_claimed_boot(state_dir: str, boot_id: str) -> bool:
    """Return whether claims of this boot may have been made already; raise Refusal.

    STATE_DIR's boot id says it. One that is garbage may have been this boot's; so may one that is
    missing beside what a claim leaves.
    """
    known = read_state_boot_id(state_dir)
    if known:
        return (
            known == boot_id or len(known) != BOOT_ID_LENGTH or known.strip(BOOT_ID_LETTERS) != ""
        )
    from gpulock.store import adoption_state as marks

    names = (marks.WHOLE, marks.PARTIAL, marks.REPAIRING)
    return any([os.path.lexists(f"{state_dir}/{name}") for name in names])


def read_state_boot_id(state_dir: str) -> str:
    """Return the boot that STATE_DIR saw last, nothing where it saw none; raise Refusal.

    What is noted there may be no boot id.
    """
    try:
        return atomic.read_text(f"{state_dir}/boot_id").strip() or EMPTY
    except FileNotFoundError:
        return ""
    except OSError as fault:
        raise Refusal(UNKNOWN, f"STATE_DIR: {fault}", "look at STATE_DIR") from fault


def why_not_local(path: str, kind: str) -> "tuple[str, str] | None":
    """Return why LOCK_DIR may not be on a kind of file system and what to do, or None; pure."""
    if kind in LOCAL_FILE_SYSTEMS:
        return None
    if kind == NO_MOUNT:
        why = f"no mount covers LOCK_DIR {path}, as in a chroot: its file system is not known"
        return why, "bind the chroot's root to itself, or mount a tmpfs there"
    return f"LOCK_DIR {path} is on {kind}", "mount a tmpfs there"


def is_full(path: str) -> bool:
    """Return whether a file system has hardly any room left; one that cannot be asked has."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    bytes_out = found.f_blocks > 0 and found.f_bfree * found.f_frsize < ROOM
    return bytes_out or (found.f_files > 0 and found.f_ffree < INODES)


def file_system_type(path: str, proc_root: str = "/proc") -> str:
    """Return the type of the file system `path` is on, as /proc/self/mountinfo names it.

    By mount id (fdinfo), which also tells btrfs and overlay mounts apart; statfs(2) has no face
    in the stdlib.
    """
    fd = os.open(path, atomic.OPEN_DIRECTORY)
    try:
        info = atomic.read_text(f"{proc_root}/self/fdinfo/{fd}")
    finally:
        os.close(fd)
    mount = info.partition("mnt_id:")[2].split(None, 1)[0]
    for line in atomic.read_text(f"{proc_root}/self/mountinfo", 1 << 26).split("\n"):
        if line.partition(" ")[0] == mount:  # users mount too, at paths of any length
            return line.partition(" - ")[2].split(None, 1)[0]
    return NO_MOUNT
