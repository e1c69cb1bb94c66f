# SPDX-License-Identifier: Apache-2.0
"""The keys of gpulock.conf: name, kind, default and meaning of each. Two tables, no more.

Hot. KEYS are a site's settings. SEAMS are of the file that `gpulock simulate` or a test writes.
"""

TEXT, PATH, COUNT, SECONDS, PERIOD, LIMIT, FLAG, WORDS, KINDS, PLACES, CHOICE = (
    "text",
    "path",
    "count",
    "seconds",
    "seconds, at least 0.05",
    "seconds, or 0",
    "yes|no",
    "words",
    "words, each NAME or NAME=KIND",
    "CARD:PLACES words",
    "choice",
)

COUNT_DIGITS = 4  # of a COUNT
MOST_SECONDS = 1e7  # seconds: four months; anything longer is a typing error
SHORTEST_PERIOD = 0.05  # seconds; a shorter one would keep a core busy

# name, kind, default, meaning; for CHOICE the default comes first among the `|` separated values
KEYS: tuple[tuple[str, str, str, str], ...] = (
    ("EXPECTED_GPUS", COUNT, "0", "number of GPUs that this node must have; 0: not known"),
    ("SHARES", PLACES, "", "cards that several jobs may hold a place of, as in 6:4 7:4"),
    ("SHARE_USERS", CHOICE, "one|many", "whose places a card has at a time: one user's, or any"),
    ("SHARE_MPS", FLAG, "no", "gpulockd runs NVIDIA's MPS for the user of a shared card"),
    ("VISIBLE_DEVICES", CHOICE, "index|uuid", "CUDA_VISIBLE_DEVICES; with isolation or MPS: uuid"),
    ("PLAIN_REQUEST", CHOICE, "card|mixed|any", "devices of a request that names no kind"),
    ("HIDE_UNREQUESTED", FLAG, "yes", "give an empty mask to a job that asked for no GPU"),
    ("DRIVER_DIR", PATH, "", "folder of driver versions, bound to /nvbin and /nvlib in containers"),
    ("ON_BUSY", CHOICE, "requeue|error", "too few devices free: requeue the job, or error"),
    ("ON_BROKEN", CHOICE, "stop|requeue", "this node is broken: stop the queue, or requeue"),
    (
        "ALLOWED_PROCESSES",
        WORDS,
        "nvidia-persistenced nv-hostengine dcgm-exporter gpulock-exporter Xorg",
        "processes of system users, by name, that may keep a device open",
    ),
    ("SGE_ROOT", PATH, "", "Grid Engine's root, for its clients and the address of qmaster"),
    ("SGE_CELL", TEXT, "default", "Grid Engine's cell"),
    ("SGE_COMPLEXES", KINDS, "gpu", "complexes that count GPUs, each of one kind"),
    ("SGE_BINARIES", PATH, "", "folder of Grid Engine's real clients (no wrapper scripts)"),
    ("SGE_SHEPHERD", PATH, "", "the real sge_shepherd, where shepherd_cmd is gpulock's"),
    ("SGE_SLAVE_TASKS", FLAG, "no", "claim for slave tasks of parallel jobs on several hosts"),
    ("SLURM_DEVICE_SELECTION", CHOICE, "slurm|gpulock", "who selects the devices of a Slurm job"),
    ("SLURM_SHARDS", CHOICE, "refuse|share", "what a job gets that asks for gres/shard"),
    ("SLURM_BINARIES", PATH, "/usr/bin", "folder of scontrol, scancel and slurmd"),
    ("SLURM_CONF", PATH, "", "path of slurm.conf, where it is not the default"),
    ("SLURM_WAIT", SECONDS, "15", "longest wait of a Prolog for a locked device, or a GPU map"),
    ("EXPORTER_LISTEN", WORDS, ":9465", "addresses of the exporter: HOST:PORT or :PORT"),
    ("WEB_CONFIG", PATH, "", "web-config.yml of the exporter: TLS and users; empty: none"),
    ("SAMPLE_PERIOD", PERIOD, "1", "time between two samples of the GPUs"),
    ("IDLE_AFTER", SECONDS, "600", "observed idle time after which a held device is held_idle"),
    ("LABEL_USER", CHOICE, "name|uid|none", "what metrics and page show of a job's user"),
    ("PROMETHEUS_URL", TEXT, "", "Prometheus server for gpulock status --cluster"),
    ("USER_CLAIMS", FLAG, "no", "gpulockd serves claims of users; only without a scheduler"),
    ("USER_MAX", COUNT, "0", "GPUs that a user of USER_CLAIMS may hold at a time; 0: any number"),
    ("CLAIM_MAX", LIMIT, "0", "a user's longest claim; one without an end gets it; 0: no limit"),
    ("RESERVE_MAX", LIMIT, "0", "GPU time a day that a user may reserve; 0: nobody may reserve"),
    ("HISTORY_DAYS", COUNT, "400", "days that the history is kept at least; 0: for ever"),
    ("IDLE_WARN", LIMIT, "0", "observed idle time before IDLE_COMMAND runs with warn; 0: never"),
    ("IDLE_COMMAND", PATH, "", "program for a claim that idles or ends soon: docs/reports.md"),
    ("IDLE_KILL", LIMIT, "0", "observed idle time before IDLE_COMMAND runs with kill; 0: never"),
    ("ISOLATION", CHOICE, "off|cgroup", "how the kernel denies a job other jobs' devices"),
    ("LEFTOVER_PROCESSES", CHOICE, "off|kill", "whether an epilog ends what its job left behind"),
    ("QUARANTINE_ON", WORDS, "xid missing", "what puts a device out: xid ecc missing health"),
    ("HEALTH_COMMAND", WORDS, "", "program, with arguments, that tests a free GPU"),
    ("CDI_DIR", PATH, "", "folder of the CDI spec that gpulockd writes, such as /var/run/cdi"),
)

# where a simulated node has what a real one has at the default; no setting of a site
SEAMS: tuple[tuple[str, str, str, str], ...] = (
    ("LOCK_DIR", PATH, "/run/gpulock", "locks; only a file that --config names may set it"),
    ("STATE_DIR", PATH, "/var/lib/gpulock", "quarantine, reserves and history; likewise"),
    ("PROC_ROOT", PATH, "/proc", "the process tree"),
    ("DRIVER_ROOT", PATH, "/proc/driver/nvidia", "what the NVIDIA driver shows"),
    ("SYS_ROOT", PATH, "/sys", "sysfs"),
    ("DEV_ROOT", PATH, "/dev", "device nodes"),
    ("SIMULATION", PATH, "", "marker file of a simulated node; empty on a real one"),
)
