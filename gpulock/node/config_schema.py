# SPDX-License-Identifier: Apache-2.0
"""The keys of gpulock.conf: one table makes the parser and `gpulock config`.

Hot. KEYS is the table: name, kind, default, meaning; `convert_setting` reads one value.
"""

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
    ("SIMULATION", TEXT, "", "marker file of a simulated node; empty on a real one"),
    ("EXPECTED_GPUS", COUNT, "0", "number of GPUs that this node must have; 0: not known"),
    ("VISIBLE_DEVICES", CHOICE, "index|uuid", "what CUDA_VISIBLE_DEVICES contains"),
    ("HIDE_UNREQUESTED", FLAG, "yes", "give an empty mask to a job that asked for no GPU"),
    ("DRIVER_DIR", TEXT, "", "folder of driver versions, bound to /nvbin and /nvlib in containers"),
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
    ("SGE_ROOT", TEXT, "", "Grid Engine's root, for qstat, qconf and the address of qmaster"),
    ("SGE_CELL", TEXT, "default", "Grid Engine's cell"),
    ("SGE_QMASTER_PORT", TEXT, "", "port, where services(5) does not name it"),
    ("SGE_EXECD_PORT", TEXT, "", "port, where services(5) does not name it"),
    ("SGE_COMPLEXES", WORDS, "gpu", "complexes that count GPUs; a job may request one of them"),
    ("SGE_BINARIES", TEXT, "", "folder of the real qstat and qconf (no wrapper scripts)"),
    ("SGE_QSTAT_TIMEOUT", ANSWER, "5", "longest wait for qstat"),
    ("SGE_SHEPHERD", TEXT, "", "the real sge_shepherd, where shepherd_cmd is gpulock's"),
    ("SGE_SLAVE_TASKS", FLAG, "no", "claim for slave tasks of parallel jobs on several hosts"),
    ("SLURM_DEVICE_SELECTION", CHOICE, "slurm|gpulock", "who selects the devices of a Slurm job"),
    (
        "SLURM_COUNT",
        CHOICE,
        "gpus|comment|slurmctld",
        "source of the count, where gpulock selects: SLURM_JOB_GPUS, job comment, or slurmctld",
    ),
    ("SLURM_GRES", WORDS, "gpu", "GRES names that count GPUs"),
    ("SLURM_BINARIES", PATH, "/usr/bin", "folder of scontrol, scancel and slurmd"),
    ("SLURM_CONF", TEXT, "", "path of slurm.conf, where it is not the default"),
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
    ("JOB_MAP_DIR", TEXT, "", "folder of the job mapping for dcgm-exporter; empty: none"),
    ("JOB_MAP_RELEASE", CHOICE, "empty|unlink", "action on a file there at the release"),
    ("GPUSTAT_DIR", TEXT, "", "folder like /run/gpustat for nvidia_gpu_prometheus_exporter"),
    ("EXPORTER_DIR", PATH, "/run/gpulock-exporter", "the exporter's sample and inventory"),
    ("EXPORTER_LISTEN", WORDS, ":9465", "addresses of the exporter: HOST:PORT or :PORT"),
    ("WEB_CONFIG", TEXT, "", "web-config.yml of the exporter: TLS and users; empty: none"),
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
    ("REPORT_DIR", TEXT, "", "folder shared by all nodes for the reports of jobs"),
    ("IDLE_WARN", LIMIT, "0", "observed idle time of a claim before IDLE_COMMAND runs"),
    ("IDLE_COMMAND", TEXT, "", "program that gpulockd runs once for an idle claim"),
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
    ("CDI_DIR", TEXT, "", "folder of the CDI spec that gpulockd writes, such as /var/run/cdi"),
)


def convert_setting(kind: str, default: str, given: str | None) -> object:
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
    if kind == LIMIT and value == "0":
        return 0.0
    if kind in (SECONDS, LIMIT, ANSWER):
        return parse_setting_seconds(value, LONGEST_ANSWER if kind == ANSWER else LONGEST)
    if kind == FLAG:
        if value not in ("yes", "no"):
            raise ValueError(f"must be yes or no, not {value!r}")
        return value == "yes"
    if kind == WORDS:
        return tuple(value.split())
    if kind == PATH and not value.startswith("/"):
        raise ValueError(f"must be an absolute path, not {value!r}")
    return value


def parse_setting_seconds(value: str, most: float) -> float:
    """Parse a positive number of seconds, at most so many."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"must be a number of seconds, not {value!r}") from None
    if not 0 < number <= most:
        raise ValueError(f"must be between 0 and {most:,.0f} seconds, not {value!r}")
    return number
