# SPDX-License-Identifier: Apache-2.0
"""The configuration: one table of keys makes the parser, `gpulock config` and the man page.

Hot. Precedence: default < file < option. The environment never configures anything: a hook runs
as root with an environment that a job's owner wrote. A file that root obeys must be root's and
writable by nobody else.
"""

import os
import stat

from gpulock import atomic
from gpulock.refusal import BROKEN, Refusal

DEFAULT_PATH = "/etc/gpulock/gpulock.conf"
TEXT, PATH, COUNT, EXIT, SECONDS, FLAG, WORDS, CHOICE = (
    "text",
    "path",
    "count",
    "exit code",
    "seconds",
    "yes|no",
    "words",
    "choice",
)

COUNT_DIGITS = 4  # of a COUNT
LARGEST_EXIT = 255  # of a program

# name, kind, default, meaning; for CHOICE the default comes first among the `|` separated values
KEYS: tuple[tuple[str, str, str, str], ...] = (
    ("LOCK_DIR", PATH, "/run/gpulock", "locks, on tmpfs or a local file system"),
    ("STATE_DIR", PATH, "/var/lib/gpulock", "quarantine and reserves, kept over a reboot"),
    ("PROC_ROOT", PATH, "/proc", "the process tree"),
    ("DRIVER_ROOT", PATH, "/proc/driver/nvidia", "what the NVIDIA driver shows"),
    ("SYS_ROOT", PATH, "/sys", "sysfs"),
    ("DEV_ROOT", PATH, "/dev", "device nodes"),
    ("SIMULATION", TEXT, "", "marker file of a simulated node; empty on a real one"),
    ("GPUS", COUNT, "0", "GPUs this node must have; 0: not known"),
    ("VISIBLE_DEVICES", CHOICE, "index|uuid", "what CUDA_VISIBLE_DEVICES holds"),
    ("HIDE_UNREQUESTED", FLAG, "yes", "give an empty mask to a job that asked for no GPU"),
    ("DRIVER_DIR", TEXT, "", "folder of driver versions for /nvbin and /nvlib in containers"),
    ("GATE_TIMEOUT", SECONDS, "20", "longest wait for the gate"),
    ("ON_BUSY", CHOICE, "requeue|error", "too few devices free: requeue the job, or error"),
    ("ON_BROKEN", CHOICE, "stop|requeue", "this node is at fault: stop the queue, or requeue"),
    (
        "SERVICES",
        WORDS,
        "nvidia-persistenced nv-hostengine dcgm-exporter gpulock-exporter Xorg",
        "executables of system users that may hold a device open",
    ),
    ("CLUSTER", TEXT, "default", "cluster or cell name in the records of gpulock run"),
    ("SGE_ROOT", TEXT, "", "Grid Engine's root, for qstat, qconf and qmaster's address"),
    ("SGE_CELL", TEXT, "default", "Grid Engine's cell"),
    ("SGE_QMASTER_PORT", TEXT, "", "port, where services(5) does not name it"),
    ("SGE_EXECD_PORT", TEXT, "", "port, where services(5) does not name it"),
    ("SGE_COMPLEXES", WORDS, "gpu", "complexes that stand for GPUs; a job may use one of them"),
    ("SGE_BINARIES", TEXT, "", "folder of the real qstat and qconf (no wrapper scripts)"),
    ("SGE_QSTAT_TIMEOUT", SECONDS, "5", "longest wait for qstat"),
    ("SGE_SHEPHERD", TEXT, "", "the real sge_shepherd, where shepherd_cmd is gpulock's"),
    ("SGE_SLAVE_TASKS", FLAG, "no", "claim for slave tasks of parallel jobs on several hosts"),
    ("SLURM_CHOOSER", CHOICE, "slurm|gpulock", "who picks the devices of a Slurm job"),
    (
        "SLURM_COUNT",
        CHOICE,
        "gpus|comment|slurmctld",
        "how many, where gpulock picks: SLURM_JOB_GPUS, the comment of job_submit, or asked",
    ),
    ("SLURM_GRES", WORDS, "gpu", "GRES names that stand for GPUs"),
    ("SLURM_BINARIES", PATH, "/usr/bin", "folder of scontrol, scancel and slurmd"),
    ("SLURM_CONF", TEXT, "", "slurm.conf for those, where it is not at their default place"),
    ("SLURM_TIMEOUT", SECONDS, "5", "longest wait for slurmctld"),
    ("SLURM_WAIT", SECONDS, "15", "longest wait for a device that Slurm gave and a lock holds"),
    ("SLURM_SPLIT_TASKS", FLAG, "no", "where gpulock picks, each task of a step gets its share"),
    ("REQUEUE_EXIT", EXIT, "213", "a task's exit code that requeues: RequeueExit of slurm.conf"),
    (
        "REFUSE",
        CHOICE,
        "requeue|cancel",
        "what becomes of a refused Slurm job of several nodes, or that is no batch job",
    ),
    ("JOB_MAP_DIR", TEXT, "", "job mapping folder for dcgm-exporter; empty: none"),
    ("JOB_MAP_RELEASE", CHOICE, "empty|unlink", "what becomes of a file there at the release"),
    ("GPUSTAT_DIR", TEXT, "", "folder like /run/gpustat for nvidia_gpu_prometheus_exporter"),
)


class Settings:
    """One value a key, in lower case; see KEYS for the meaning."""

    __slots__ = (
        "cluster",
        "dev_root",
        "driver_dir",
        "driver_root",
        "gate_timeout",
        "gpus",
        "gpustat_dir",
        "hide_unrequested",
        "job_map_dir",
        "job_map_release",
        "lock_dir",
        "on_broken",
        "on_busy",
        "path",
        "proc_root",
        "refuse",
        "requeue_exit",
        "services",
        "sge_binaries",
        "sge_cell",
        "sge_complexes",
        "sge_execd_port",
        "sge_qmaster_port",
        "sge_qstat_timeout",
        "sge_root",
        "sge_shepherd",
        "sge_slave_tasks",
        "simulation",
        "slurm_binaries",
        "slurm_chooser",
        "slurm_conf",
        "slurm_count",
        "slurm_gres",
        "slurm_split_tasks",
        "slurm_timeout",
        "slurm_wait",
        "state_dir",
        "sys_root",
        "visible_devices",
    )
    lock_dir: str
    state_dir: str
    proc_root: str
    driver_root: str
    sys_root: str
    dev_root: str
    simulation: str
    gpus: int
    visible_devices: str
    hide_unrequested: bool
    driver_dir: str
    gate_timeout: float
    on_busy: str
    on_broken: str
    services: tuple[str, ...]
    cluster: str
    sge_root: str
    sge_cell: str
    sge_qmaster_port: str
    sge_execd_port: str
    sge_complexes: tuple[str, ...]
    sge_binaries: str
    sge_qstat_timeout: float
    sge_shepherd: str
    sge_slave_tasks: bool
    slurm_chooser: str
    slurm_count: str
    slurm_gres: tuple[str, ...]
    slurm_binaries: str
    slurm_conf: str
    slurm_timeout: float
    slurm_wait: float
    slurm_split_tasks: bool
    requeue_exit: int
    refuse: str
    job_map_dir: str
    job_map_release: str
    gpustat_dir: str
    path: str

    def __init__(self, values: dict[str, str], path: str = "") -> None:
        """Take the defaults, then `values`; raise ValueError for an unknown key or bad value."""
        self.path = path
        for name, kind, default, _ in KEYS:
            setattr(self, name.lower(), convert(kind, default, values.pop(name, None)))
        for name in values:
            raise ValueError(f"unknown key {name}")


def convert(kind: str, default: str, given: str | None) -> object:
    """Return the value of one key; raise ValueError that says what is wrong."""
    if kind == CHOICE:
        choices = default.split("|")
        if given is not None and given not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {given!r}")
        return choices[0] if given is None else given
    value = default if given is None else given
    if kind in (COUNT, EXIT):
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"must be a whole number, not {value[:40]!r}")
        if len(value) > COUNT_DIGITS:
            raise ValueError("is larger than any node")
        if kind == EXIT and not 0 < int(value) <= LARGEST_EXIT:
            raise ValueError(f"must be from 1 to {LARGEST_EXIT}, not {value}")
        return int(value)
    if kind == SECONDS:
        return seconds(value)
    if kind == FLAG:
        if value not in ("yes", "no"):
            raise ValueError(f"must be yes or no, not {value!r}")
        return value == "yes"
    if kind == WORDS:
        return tuple(value.split())
    if kind == PATH and not value.startswith("/"):
        raise ValueError(f"must be an absolute path, not {value!r}")
    return value


def seconds(value: str) -> float:
    """Parse a positive number of seconds."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"must be a number of seconds, not {value!r}") from None
    if not 0 < number < 1e7:  # noqa: PLR2004 (four months: anything longer is a typing error)
        raise ValueError(f"must be between 0 and 10,000,000 seconds, not {value!r}")
    return number


def parse(text: str, path: str) -> Settings:
    """Parse a settings file; raise ValueError with `path:line` for the first fault."""
    known = {key[0]: key for key in KEYS}
    values: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not equals:
            raise ValueError(f"{path}:{number}: not KEY=VALUE: {line[:60]!r}")
        if name not in known:
            raise ValueError(f"{path}:{number}: unknown key {name!r}")
        if name in values:
            raise ValueError(f"{path}:{number}: {name} is given twice")
        try:
            convert(known[name][1], known[name][2], value)
        except ValueError as fault:
            raise ValueError(f"{path}:{number}: {name} {fault}") from None
        values[name] = value
    return Settings(values, path)


def unquote(value: str) -> str:
    """Strip one pair of quotes: the file can be read by a shell or by systemd as well."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def load(path: str, uid: int | None = None) -> Settings:
    """Read the settings of this node; raise Refusal(BROKEN) where they cannot be believed.

    A missing default file means the defaults; any other missing file is an error. The file must
    belong to root or to `uid` (the caller) and be writable by nobody else.
    """
    caller = os.geteuid() if uid is None else uid
    try:
        info = os.stat(path)
        if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{path}: belongs to uid {info.st_uid}, mode {info.st_mode & 0o7777:o}"
            )
        settings = parse(atomic.read_text(os.path.realpath(path)), path)
    except FileNotFoundError:
        if path != DEFAULT_PATH:
            raise Refusal(BROKEN, f"no settings file {path}", "run gpulock doctor") from None
        settings = Settings({}, path)
    except (OSError, ValueError) as fault:
        raise Refusal(BROKEN, f"settings: {fault}", "correct the file") from fault
    check_simulation(settings, caller)
    return settings


def check_simulation(settings: Settings, uid: int) -> None:
    """Refuse a simulation marker that is not the caller's; root obeys none but its own."""
    if not settings.simulation:
        return
    try:
        info = os.lstat(settings.simulation)
        first = atomic.read_text(settings.simulation).split("\n", 1)[0]
    except OSError as fault:
        raise Refusal(BROKEN, f"simulation marker: {fault}", "run gpulock simulate") from fault
    if info.st_uid != uid or first != "gpulock-simulation 1":
        raise Refusal(
            BROKEN,
            f"{settings.simulation} is no marker of uid {uid}",
            "use a simulated node of your own",
        )
