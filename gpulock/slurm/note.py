# SPDX-License-Identifier: Apache-2.0
"""What a job's tasks are told: tasks/<node>.<job> beside the records, by Prolog until Epilog.

Hot. TaskProlog runs as the user and believes nothing of the environment: it finds here what this
node granted, or why it refused.
"""

from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.devices import Device
from gpulock.slurm.call import is_slurm_number
from gpulock.store import atomic, kv
from gpulock.store.locks import LockStore
from gpulock.store.owner import Owner, parse_owner

FOLDER = "tasks"
LINE = "gpulock-task 1"
REQUEUE_EXIT = 213  # of a task: slurm.conf has it in RequeueExit
PATIENCE = 1.0  # seconds at the gate, for a note that matters to no lock


class TaskNote:
    """What stands in one file: a grant, nothing asked for, or a refusal with its exit code."""

    def __init__(self, slurmd: str, job: str, uid: int, restart: int) -> None:
        self.slurmd = slurmd
        self.job = job
        self.uid = uid
        self.restart = restart
        self.token = ""
        self.devices: list[Device] = []
        self.positions: list[str] = []
        self.binds = ""
        self.refused = ""
        self.code = 0

    def encode(self) -> str:
        """Return the text; raise kv.MalformedError for a control character."""
        pairs = [
            *[
                (key, str(getattr(self, key)))
                for key in ("slurmd", "job", "uid", "restart", "token")
            ],
            ("devices", ",".join([d.id for d in self.devices])),
            ("indexes", ",".join([str(d.index) for d in self.devices])),
            ("uuids", ",".join([d.uuid for d in self.devices])),
            ("places", str(self.devices[0].places if self.devices else 0)),
            ("positions", ",".join(self.positions)),
            *[(key, str(getattr(self, key))) for key in ("binds", "refused", "code")],
        ]
        return LINE + "\n" + kv.encode_pairs(pairs)


def parse_task_note(text: str) -> TaskNote:
    """Return a note; raise kv.MalformedError."""
    try:
        pairs = kv.decode_pairs(text, LINE)
        note = TaskNote(pairs["slurmd"], pairs["job"], int(pairs["uid"]), int(pairs["restart"]))
        note.token = pairs["token"]
        note.positions = [p for p in pairs["positions"].split(",") if p]
        note.binds, note.refused, note.code = pairs["binds"], pairs["refused"], int(pairs["code"])
        ids = [d for d in pairs["devices"].split(",") if d]
        indexes, uuids = pairs["indexes"].split(","), pairs["uuids"].split(",")
        for number, name in enumerate(ids):
            device = Device(name, int(indexes[number]))
            device.uuid, device.places = uuids[number], int(pairs.get("places", "0"))
            note.devices.append(device)
    except (KeyError, ValueError, IndexError) as fault:
        raise kv.MalformedError(f"not a task's note: {fault}") from None
    return note


def task_note_path(root: str, slurmd: str, job: str) -> str:
    """Return where a job's note is, below `claims_root`: several slurmd may share a machine."""
    return f"{root}/{FOLDER}/{slurmd}.{job}"


def write_task_note(store: LockStore, note: TaskNote) -> None:
    """Write a job's note; raise OSError or kv.MalformedError. Of a claim with the gate held."""
    atomic.mkdir_if_missing(f"{store.root}/{FOLDER}")
    data = note.encode().encode("utf-8", "surrogateescape")
    atomic.replace_file(task_note_path(store.root, note.slurmd, note.job), data)


def is_task_note_superseded(store: LockStore, own: TaskNote) -> bool:
    """Return whether a later run of the same job has a note already: `own` comes too late."""
    try:
        noted = find_task_note(store.root, own.slurmd, own.job)
    except (OSError, kv.MalformedError):
        return False
    return noted is not None and noted.uid == own.uid and noted.restart > own.restart


def check_task_claim(store: LockStore, note: TaskNote) -> Owner:
    """Return the record of the claim that a note is of; raise Refusal unless both name the same.

    The record gives each device its minor. A lock that was removed is made again by the next claim.
    """
    try:
        record = parse_owner(store.read_record(note.token))
    except FileNotFoundError as fault:
        raise lost_lock_refusal(note.devices[0], "its claim is over") from fault
    except (OSError, kv.MalformedError) as fault:
        raise lost_lock_refusal(note.devices[0], str(fault)) from fault
    for device in note.devices:
        if device.id not in record.devices:
            raise lost_lock_refusal(device, "another job may have it")
        minor = record.minor_of(device.id)
        device.minor = int(minor) if is_slurm_number(minor) else -1
    if {device.id for device in note.devices} != {*record.devices}:
        raise lost_lock_refusal(note.devices[0], "its claim has more devices than the job's note")
    return record


def lost_lock_refusal(device: Device, why: str) -> Refusal:
    """Return the refusal of a task or step whose lock is not its job's any more."""
    what = f"the lock of GPU {device.index} is lost: {why}"
    return Refusal(UNKNOWN, what, f"see gpulock why {device.id}")


def remove_task_note(store: LockStore, own: TaskNote, tokens: set[str]) -> None:
    """Take a job's note away, unless it is another user's, a later run's, or of a standing claim.

    The gate is held, or shut: nobody writes the note of a later claim between the comparison and
    the removal. `own` says of whose run the caller is, `tokens` which claims it gives up, whatever
    still keeps their locks.
    """
    try:
        note = find_task_note(store.root, own.slurmd, own.job)
        if note is None or note.uid != own.uid or note.restart > own.restart:
            return
        standing = [one for one in note.devices if store.is_held(note.token, one.id)]
        if standing and note.token not in tokens:
            return
    except (OSError, kv.MalformedError):
        pass  # whatever it is, no task can use it
    atomic.remove_quietly(task_note_path(store.root, own.slurmd, own.job))


def find_task_note(root: str, slurmd: str, job: str) -> "TaskNote | None":
    """Return a job's note, None where there is none; raise OSError or kv.MalformedError."""
    try:
        return parse_task_note(atomic.read_text(task_note_path(root, slurmd, job)))
    except FileNotFoundError:
        return None
