# SPDX-License-Identifier: Apache-2.0
"""The owner record inside a lock: whose a device is, and how that owner's death can be proven.

Hot. The annotations of Owner are normative. The key fields (scheduler, cluster, slurmd, job_id,
task_id) mean the same in all versions; an unknown key is ignored; an unknown version is held and
reported, never reaped.
"""

from gpulock.store import atomic, kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VERSION_LINE = "gpulock-owner 1"
NUMBER_DIGITS = 4300  # digits of a number, as newer Pythons have it
HEALTH_USER, HEALTH_COMMENT = "gpulockd", "health check"  # of a claim that gives way to any other
NO_CLUSTER = "default"  # in a record that no scheduler's cluster has
ENDING_COMMENT = "health check, which is to end"  # a claim asked for its device


class Owner:
    """One owner record; its fields are written in this order.

    `draining` is not written: 1 where its job has released it and its processes are not yet gone.
    """

    scheduler: str = ""  # sge, slurm, process or admin
    cluster: str = ""  # cluster or cell
    node: str = ""  # host name of this node, for people
    job_id: str = ""  # job id; of a process its pid; of a reserve its device
    task_id: str = ""  # array task, empty where there is none
    pid: int = 0  # shepherd, or the process that holds (sge, process)
    start: int = 0  # its start time in clock ticks since boot (sge, process)
    restart: int = 0  # restart count of the job (slurm)
    slurmd: str = ""  # SLURMD_NODENAME: several may run on one machine (slurm)
    sluid: str = ""  # SLURM_JOB_SLUID, which may name the job's cgroup; empty: not known (slurm)
    positions: str = ""  # SLURM_JOB_GPUS of the prolog, empty: not known (slurm)
    het_leader: str = ""  # job id of a heterogeneous job's leader (slurm)
    user: str = ""  # name of the owner
    uid: int = 0  # uid of the owner
    queue: str = ""  # queue or partition (sge, slurm)
    spool_dir: str = ""  # the job's spool directory (sge)
    add_grp_id: int = 0  # supplementary group of the job's processes, 0: none (sge)
    sid: int = 0  # session of the holding process (process)
    boot_id: str = ""  # boot in which the claim was made
    namespaces: str = ""  # pid and time namespace in which pid and start mean something
    claimed_at: float = 0.0  # epoch seconds, for people
    claimed_boottime: float = 0.0  # CLOCK_BOOTTIME seconds, for durations
    token: str = ""  # random, one a claim
    uuids: tuple[str, ...] = ()  # UUID of each device, empty: not known at the claim
    minors: tuple[str, ...] = ()  # N of each device's /dev/nvidiaN, empty: not known
    places: int = 0  # of a share: how many of them its card was parted into, 0: not known
    comment: str = ""  # why (admin); `run` or `claim --pid`, else empty (process)
    note: str = ""  # what its owner wrote beside it (process)
    until: float = 0.0  # CLOCK_BOOTTIME seconds of its end, 0: none (process)
    devices: tuple[str, ...] = ()  # ids of the whole grant; the last line: it marks a whole record
    # not written
    draining: int = 0

    def __init__(self, **fields: object) -> None:
        """Take the fields given, others blank; raise TypeError for one that is none."""
        if not fields.keys() <= FIELDS:
            raise TypeError(f"no such field: {sorted(fields.keys() - FIELDS)}")
        self.__dict__.update(fields)

    def copy(self, **changes: object) -> "Owner":
        """Return the same record with some fields changed."""
        return Owner(**{**self.__dict__, **changes})

    def uuid_of(self, name: str) -> str:
        """Return the UUID of one of its devices, or nothing."""
        return item_or_blank(self.uuids, self.devices.index(name))

    def minor_of(self, name: str) -> str:
        """Return N of the /dev/nvidiaN of one of its devices, or nothing."""
        return item_or_blank(self.minors, self.devices.index(name))

    def of_devices(self, names: "list[str]") -> "Owner":
        """Return the record with some of its devices only."""
        return self.copy(
            devices=tuple(names),
            uuids=tuple([self.uuid_of(name) for name in names]),
            minors=tuple([self.minor_of(name) for name in names]),
        )

    def key(self) -> tuple[str, str, str, str, str]:
        """Return what names the job: scheduler, cluster, slurmd, job, task.

        The node's name is no part of it: records are this node's, and a host name may change.
        """
        return (self.scheduler, self.cluster, self.slurmd, self.job_id, self.task_id)

    def run(self) -> tuple[int, int, int]:
        """Return what tells one run of the same job from another."""
        return (self.pid, self.start, self.restart)

    def is_reserve(self) -> bool:
        """Return whether an administrator holds the device, for which nothing is to work."""
        return self.scheduler == "admin"

    def is_health_check(self) -> bool:
        """Return whether gpulockd holds the device for HEALTH_COMMAND."""
        return self.user == HEALTH_USER and self.comment in (HEALTH_COMMENT, ENDING_COMMENT)

    def gives_way(self) -> bool:
        """Return whether a claim may ask for the device: a check has it that none asked to end."""
        return self.comment == HEALTH_COMMENT and self.user == HEALTH_USER

    def job(self) -> str:
        """Return how people name the job: `12`, `12.3` for an array task, `pid 4711`."""
        if self.scheduler == "process":
            return f"pid {self.job_id}"
        if self.scheduler == "admin":
            return "reserve"
        return f"{self.job_id}.{self.task_id}" if self.task_id else self.job_id


def parse_number(text: str) -> int:
    """Return a whole number; raise ValueError, also where a Python of before 3.9.14 would not."""
    if len(text) > NUMBER_DIGITS:
        raise ValueError("too long a number")
    return int(text)


TEXT, NUMBER, REAL, LIST = str, int, float, tuple[str, ...]
FIELDS = Owner.__annotations__.keys()
TYPES = {key: kind for key, kind in Owner.__annotations__.items() if key != "draining"}
CONVERT: "dict[object, Callable[[str], object]]" = {
    NUMBER: parse_number,
    REAL: float,
    LIST: lambda text: tuple(text.split(",")) if text else (),
}
CONVERTED = {key: CONVERT[kind] for key, kind in TYPES.items() if kind is not TEXT}


def item_or_blank(items: "tuple[str, ...]", place: int) -> str:
    """Return one item of a list that may be shorter."""
    return items[place] if place < len(items) else ""


def encode_owner(owner: Owner) -> str:
    """Return the record as text; raise kv.MalformedError for a control character in a field."""
    pairs: list[tuple[str, str]] = []
    for key in TYPES:
        value = getattr(owner, key)
        if not value:
            continue
        if isinstance(value, tuple):
            pairs.append((key, ",".join(value)))
        elif isinstance(value, float):
            pairs.append((key, f"{value:.6f}"))  # as fine as two hooks may follow each other
        else:
            pairs.append((key, str(value)))
    return VERSION_LINE + "\n" + kv.encode_pairs(pairs)


def parse_owner(text: str) -> Owner:
    """Return the record; raise kv.MalformedError for another version, a bad number, or no end.

    A record that was cut short lacks `devices`, or the end of a line.
    """
    pairs = kv.decode_pairs(text, VERSION_LINE)
    fields: dict[str, object] = {}
    for key, value in pairs.items():
        if key in CONVERTED:
            try:
                fields[key] = CONVERTED[key](value)
            except ValueError:
                raise kv.MalformedError(f"{key}={value[:40]!r} is no number") from None
        elif key in TYPES:
            fields[key] = value
    for key in ("scheduler", "node", "job_id", "token", "boot_id", "devices"):
        if not fields.get(key):
            raise kv.MalformedError(f"{key} is missing")
    if text[-1] != "\n" or "\0" in text:  # zeros: blocks that a power cut left unwritten
        raise kv.MalformedError("it was cut short")
    record = Owner()
    record.__dict__ = fields  # each was looked up: a claim reads a thousand records
    return record


def is_cut_short(text: str) -> bool:
    """Return whether a text is the beginning of a record, or has zeros in the place of blocks.

    A killed writer leaves the one, a power cut both.
    """
    begins = text.startswith(VERSION_LINE) or VERSION_LINE.startswith(text)
    return "\0" in text or (begins and not (text.endswith("\n") and "\ndevices=" in text))


def read_anchor(path: str) -> "tuple[int, int, int] | None":
    """Return (pid, start, group) of an anchor, None for one forgotten since it was listed.

    Raises OSError or ValueError.
    """
    try:
        pid, start, gid = map(parse_number, atomic.read_text(path).split())
    except FileNotFoundError:
        return None
    return pid, start, gid
