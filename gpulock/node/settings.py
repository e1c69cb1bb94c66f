# SPDX-License-Identifier: Apache-2.0
"""The configuration of this node, read from gpulock.conf by the table of keys.

Hot. Precedence: default < file < option. The environment never configures anything: a hook runs
as root with an environment that a job's owner wrote. A file that root obeys must be root's and
writable by no other user.
"""

import os
import stat

from gpulock.errors import BROKEN, Refusal
from gpulock.store import atomic

DEFAULT_PATH = "/etc/gpulock/gpulock.conf"

TEXT, PATH, COUNT, EXIT, SECONDS, ANSWER, LIMIT, FLAG, WORDS, CHOICE = (
    "text",
    "path",
    "count",
    "exit code",
    "seconds",
    "seconds, at most 20",
    "seconds, or 0",
    "yes|no",
    "words",
    "choice",
)

COUNT_DIGITS = 4  # of a COUNT
LARGEST_EXIT = 255  # of a program
LONGEST = 1e7  # seconds: four months; anything longer is a typing error
LONGEST_ANSWER = 20.0  # seconds; gpulockd asks twice before it is ready, for which it has 60

# name, kind, default, meaning; for CHOICE the default comes first among the `|` separated values
KEYS: tuple[tuple[str, str, str, str], ...] = (
    ("LOCK_DIR", PATH, "/run/gpulock", "locks, on tmpfs or a local file system"),
    ("STATE_DIR", PATH, "/var/lib/gpulock", "quarantine, reserves and history, kept over a reboot"),
    ("PROC_ROOT", PATH, "/proc", "the process tree"),
    ("DRIVER_ROOT", PATH, "/proc/driver/nvidia", "what the NVIDIA driver shows"),
    ("SYS_ROOT", PATH, "/sys", "sysfs"),
    ("DEV_ROOT", PATH, "/dev", "device nodes"),
    ("SIMULATION", PATH, "", "marker file of a simulated node; empty on a real one"),
    ("EXPECTED_GPUS", COUNT, "0", "number of GPUs that this node must have; 0: not known"),
    ("VISIBLE_DEVICES", CHOICE, "index|uuid", "what CUDA_VISIBLE_DEVICES contains"),
    ("HIDE_UNREQUESTED", FLAG, "yes", "give an empty mask to a job that asked for no GPU"),
    ("DRIVER_DIR", PATH, "", "folder of driver versions, bound to /nvbin and /nvlib in containers"),
    ("GATE_TIMEOUT", SECONDS, "20", "longest wait for the gate, the lock of LOCK_DIR"),
    ("ON_BUSY", CHOICE, "requeue|error", "too few devices free: requeue the job, or error"),
    ("ON_BROKEN", CHOICE, "stop|requeue", "this node is broken: stop the queue, or requeue"),
    (
        "ALLOWED_PROCESSES",
        WORDS,
        "nvidia-persistenced nv-hostengine dcgm-exporter gpulock-exporter Xorg",
        "programs of system users that may keep a device open",
    ),
    ("CLUSTER", TEXT, "default", "cluster name in the records of gpulock run"),
    ("SGE_ROOT", PATH, "", "Grid Engine's root, for qstat, qconf and the address of qmaster"),
    ("SGE_CELL", TEXT, "default", "Grid Engine's cell"),
    ("SGE_QMASTER_PORT", TEXT, "", "port, where services(5) does not name it"),
    ("SGE_EXECD_PORT", TEXT, "", "port, where services(5) does not name it"),
    ("SGE_COMPLEXES", WORDS, "gpu", "complexes that count GPUs; a job may request one of them"),
    ("SGE_BINARIES", PATH, "", "folder of the real qstat and qconf (no wrapper scripts)"),
    ("SGE_QSTAT_TIMEOUT", ANSWER, "5", "longest wait for qstat"),
    ("SGE_SHEPHERD", PATH, "", "the real sge_shepherd, where shepherd_cmd is gpulock's"),
    ("SGE_SLAVE_TASKS", FLAG, "no", "claim for slave tasks of parallel jobs on several hosts"),
    ("SLURM_DEVICE_SELECTION", CHOICE, "slurm|gpulock", "who selects the devices of a Slurm job"),
    (
        "SLURM_COUNT",
        CHOICE,
        "gpus|comment|slurmctld",
        "source of the count, where gpulock selects: SLURM_JOB_GPUS, job comment, or slurmctld",
    ),
    ("SLURM_GRES", WORDS, "gpu", "GRES names that count GPUs"),
    ("SLURM_SHARDS", CHOICE, "refuse|share", "what a job gets that asks for gres/shard"),
    ("SLURM_BINARIES", PATH, "/usr/bin", "folder of scontrol, scancel and slurmd"),
    ("SLURM_CONF", PATH, "", "path of slurm.conf, where it is not the default"),
    ("SLURM_TIMEOUT", ANSWER, "5", "longest wait for slurmctld"),
    ("SLURM_WAIT", SECONDS, "15", "longest wait for a locked device that Slurm assigned"),
    ("SLURM_SPLIT_TASKS", FLAG, "no", "where gpulock selects: give each task of a step its share"),
    ("REQUEUE_EXIT", EXIT, "213", "exit code of a task that requeues: RequeueExit of slurm.conf"),
    (
        "SLURM_ON_REFUSAL",
        CHOICE,
        "requeue|cancel",
        "action on a refused Slurm job that spans nodes or is no batch job",
    ),
    ("JOB_MAP_DIR", PATH, "", "folder of the job mapping for dcgm-exporter; empty: none"),
    ("JOB_MAP_RELEASE", CHOICE, "empty|unlink", "action on a file there at the release"),
    ("GPUSTAT_DIR", PATH, "", "folder like /run/gpustat for nvidia_gpu_prometheus_exporter"),
    ("EXPORTER_DIR", PATH, "/run/gpulock-exporter", "the exporter's sample and inventory"),
    ("EXPORTER_LISTEN", WORDS, ":9465", "addresses of the exporter: HOST:PORT or :PORT"),
    ("WEB_CONFIG", PATH, "", "web-config.yml of the exporter: TLS and users; empty: none"),
    ("SAMPLE_PERIOD", SECONDS, "1", "time between two samples of the GPUs"),
    ("PROCESS_PERIOD", SECONDS, "10", "time between two reads of the GPUs' process lists"),
    ("MAX_SAMPLE_AGE", SECONDS, "10", "older values of the GPUs are not shown"),
    ("IDLE_AFTER", SECONDS, "600", "observed idle time after which a held device is held_idle"),
    ("LABEL_USER", CHOICE, "name|uid|none", "what metrics and page show of a job's user"),
    ("PAUSE_MAX", SECONDS, "600", "longest pause of the exporter; it then continues"),
    ("PROMETHEUS_URL", TEXT, "", "Prometheus server for gpulock status --cluster"),
    ("USER_CLAIMS", FLAG, "no", "gpulockd serves claims of users; only without a scheduler"),
    ("REPORT_AT_END", FLAG, "no", "print a report of a job's GPUs at its end"),
    ("REPORT_COMMAND", PATH, "/usr/local/bin/gpulock", "the gpulock that prints it in an epilog"),
    ("REPORT_DIR", PATH, "", "folder shared by all nodes for the reports of jobs"),
    ("IDLE_WARN", LIMIT, "0", "observed idle time of a claim before IDLE_COMMAND runs"),
    ("IDLE_COMMAND", PATH, "", "program that gpulockd runs once for an idle claim"),
    ("IDLE_KILL", LIMIT, "0", "observed idle time of a claim before its job is ended"),
    ("ISOLATION", CHOICE, "off|group|cgroup", "how the kernel denies a job other jobs' devices"),
    (
        "LEFTOVER_PROCESSES",
        CHOICE,
        "off|report|kill",
        "what an epilog does with leftover processes of its job",
    ),
    ("LEFTOVER_MEMORY", COUNT, "256", "MiB that may stay in use on a released device"),
    ("LEFTOVER_TIMEOUT", SECONDS, "10", "longest time an epilog spends on leftover processes"),
    ("QUARANTINE_ON", WORDS, "", "what puts a device out of service: xid ecc missing memory"),
    ("RESTORE_AFTER", COUNT, "3", "clean checks in a row before gpulockd restores such a device"),
    ("SGE_COUNT_HOSTS", WORDS, "", "hosts whose counts at qmaster this gpulockd lowers then"),
    ("SLURM_ON_UNHEALTHY", CHOICE, "log|drain", "action at Slurm while a device is out of service"),
    ("CDI_DIR", PATH, "", "folder of the CDI spec that gpulockd writes, such as /var/run/cdi"),
)


class Settings:
    """One value a key, in lower case; see KEYS for the meaning.

    `given` is what the file says, by key; `faults` are sentences on what in it is not obeyed.
    `copy_path` is of the settings that root obeyed last (gpulock.node.last_settings).
    """

    lock_dir: str
    state_dir: str
    proc_root: str
    driver_root: str
    sys_root: str
    dev_root: str
    simulation: str
    expected_gpus: int
    visible_devices: str
    hide_unrequested: bool
    driver_dir: str
    gate_timeout: float
    on_busy: str
    on_broken: str
    allowed_processes: tuple[str, ...]
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
    slurm_device_selection: str
    slurm_count: str
    slurm_gres: tuple[str, ...]
    slurm_shards: str
    slurm_binaries: str
    slurm_conf: str
    slurm_timeout: float
    slurm_wait: float
    slurm_split_tasks: bool
    requeue_exit: int
    slurm_on_refusal: str
    job_map_dir: str
    job_map_release: str
    gpustat_dir: str
    exporter_dir: str
    exporter_listen: tuple[str, ...]
    web_config: str
    sample_period: float
    process_period: float
    max_sample_age: float
    idle_after: float
    label_user: str
    pause_max: float
    prometheus_url: str
    user_claims: bool
    report_at_end: bool
    report_command: str
    report_dir: str
    idle_warn: float
    idle_command: str
    idle_kill: float
    isolation: str
    leftover_processes: str
    leftover_memory: int
    leftover_timeout: float
    quarantine_on: tuple[str, ...]
    restore_after: int
    sge_count_hosts: tuple[str, ...]
    slurm_on_unhealthy: str
    cdi_dir: str
    path: str
    copy_path: str
    given: dict[str, str]
    faults: tuple[str, ...]

    def __init__(self, values: dict[str, str], path: str = "") -> None:
        """Take the defaults, then `values`; raise ValueError for an unknown key or bad value."""
        self.path, self.given, self.faults = path, values.copy(), ()
        for name, kind, default, _ in KEYS:
            setattr(self, name.lower(), convert_setting(kind, default, values.pop(name, None)))
        for name in values:
            raise ValueError(f"unknown key {name}")
        self.copy_path = f"{self.state_dir}/settings.obeyed"
        if self.isolation != "off":
            self.visible_devices = "uuid"  # CUDA counts only the devices that it can open


def convert_setting(kind: str, default: str, given: str | None) -> object:
    """Return the value of one key; raise ValueError that says what is wrong."""
    choices = {CHOICE: default.split("|"), FLAG: ["yes", "no"]}.get(kind, [])
    value = given if given is not None else choices[0] if kind == CHOICE else default
    if choices and value not in choices:
        raise ValueError(f"must be {' or '.join(choices)}, not {value!r}")
    if kind in (COUNT, EXIT):
        if not (value.isascii() and value.isdigit() and len(value) <= COUNT_DIGITS):
            raise ValueError(
                f"must be a whole number of at most {COUNT_DIGITS} digits, not {value!r}"
            )
        if kind == EXIT and not 0 < int(value) <= LARGEST_EXIT:
            raise ValueError(f"must be from 1 to {LARGEST_EXIT}, not {value}")
        return int(value)
    if kind in (SECONDS, LIMIT, ANSWER):
        most = LONGEST_ANSWER if kind == ANSWER else LONGEST
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"must be a number of seconds, not {value!r}") from None
        if not 0 < number <= most and (kind, value) != (LIMIT, "0"):
            raise ValueError(f"must be between 0 and {most:,.0f} seconds, not {value!r}")
        return number
    if kind == PATH and not value.startswith("/") and (value or default):
        raise ValueError(f"must be an absolute path, not {value!r}")
    return value == "yes" if kind == FLAG else tuple(value.split()) if kind == WORDS else value


def parse_settings(text: str, path: str) -> Settings:
    """Parse a settings file; raise ValueError with `path:line` for the first fault.

    An unknown key may be another version's: it is told in `faults`, and not obeyed.
    """
    known = {key[0]: key for key in KEYS}
    values: dict[str, str] = {}
    faults: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]  # a shell or systemd may read the file as well
        if not equals:
            raise ValueError(f"{path}:{number}: not KEY=VALUE: {line[:60]!r}")
        if name not in known:
            from gpulock.node.last_settings import RENAMED

            now = f": it is {RENAMED[name]} now" if name in RENAMED else ""
            fault = f"{path}:{number}: unknown key {name!r}{now}"
            if not (name.isascii() and name.isupper() and name.replace("_", "").isalnum()):
                raise ValueError(fault)
            faults.append(fault)
            continue
        if name in values:
            raise ValueError(f"{path}:{number}: {name} is given twice")
        try:
            convert_setting(known[name][1], known[name][2], value)
        except ValueError as wrong:
            raise ValueError(f"{path}:{number}: {name} {wrong}") from None
        values[name] = value
    settings = Settings(values, path)
    settings.faults = tuple(faults)
    return settings


def read_settings(path: str, uid: int | None = None, keep: bool = False) -> Settings:
    """Read the settings of this node; raise Refusal(BROKEN) where they cannot be believed.

    A missing default file means the defaults; any other missing file is an error. The file must
    belong to root or to `uid` (the caller) and be writable by no other user. In the place of a file
    that is empty, gone or not understood what root obeyed last counts, and `faults` tells why.
    Who obeys as root passes `keep`: what is read is what was obeyed last from now on.
    """
    caller = os.geteuid() if uid is None else uid
    info, text = None, ""
    found: Settings | Refusal
    try:
        info = os.stat(path)
        if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = (
                f"settings: {path}: belongs to uid {info.st_uid}, mode {info.st_mode & 0o7777:o},"
                " and must be root's or the caller's and writable by no other user"
            )
            raise Refusal(BROKEN, why, "correct the file")
        text = atomic.read_text(atomic.resolve_link(path))
        found = parse_settings(text, path)
    except FileNotFoundError:
        missing = Refusal(BROKEN, f"no settings file {path}", "run gpulock doctor")
        found = Settings({}, path) if path == DEFAULT_PATH else missing
    except OSError as fault:
        found = Refusal(BROKEN, f"settings: {path}: {fault.strerror}", "name a file")
        if isinstance(fault, PermissionError):  # the copy's mode may be that of an earlier file
            raise found from fault
    except ValueError as fault:
        found = Refusal(BROKEN, f"settings: {fault}", "correct the file")
    settings = found
    if isinstance(settings, Refusal) or settings.faults or not text:
        from gpulock.node.last_settings import recover_settings

        settings = recover_settings(parse_settings, settings, path, text, caller)
    check_simulation_marker(settings, caller)
    if keep and info and text and isinstance(found, Settings):
        try:
            of = int(os.stat(settings.copy_path).st_mtime)
        except OSError:
            of = 0
        if of != int(info.st_ctime):
            from gpulock.node.last_settings import write_copy

            write_copy(parse_settings, settings, info)
    return settings


def check_simulation_marker(settings: Settings, uid: int) -> None:
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
