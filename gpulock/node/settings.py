# SPDX-License-Identifier: Apache-2.0
"""The configuration of this node: a value for each key of the table, and the text that gives it.

Hot. Precedence: default < file < option. The environment never configures anything: a hook runs
as root with an environment that a job's owner wrote.
"""

import os

from gpulock.node.setting_keys import (
    CHOICE,
    COUNT,
    COUNT_DIGITS,
    FLAG,
    KEYS,
    KINDS,
    LIMIT,
    MOST_SECONDS,
    PATH,
    PERIOD,
    PLACES,
    SEAMS,
    SECONDS,
    SHORTEST_PERIOD,
    WORDS,
)

DEFAULTS: dict[tuple[str, str], object] = {}  # as converted, by kind: a daemon reads many files
SAMPLES_KEPT = 10  # periods after which a sample is old: some may come late
SHORTEST_SAMPLE_AGE = 2.0  # seconds: a tick of the exporter without a frame comes after 1.5
LONGEST_PROCESS_PERIOD = 10.0  # seconds between two reads of the GPUs' process lists, at most
FIXED = ("LOCK_DIR", "STATE_DIR")  # on a real node: one that moved would be granted twice


class Settings:
    """One value a key, in lower case; see KEYS and SEAMS for the meaning.

    `given` is what the file says, by key; `faults` are sentences on what in it is not obeyed, and
    `ignored` the keys of it that are not read.
    `copy_path` is of the last file without a fault (gpulock.node.settings_file). `mps_dir` has the
    pipes and logs of MPS: a user may fill it, without harm to the locks.
    """

    lock_dir: str
    state_dir: str
    expected_gpus: int
    shares: tuple[str, ...]
    share_users: str
    share_mps: bool
    visible_devices: str
    plain_request: str
    hide_unrequested: bool
    driver_dir: str
    on_busy: str
    on_broken: str
    allowed_processes: tuple[str, ...]
    sge_root: str
    sge_cell: str
    sge_complexes: tuple[str, ...]
    sge_kinds: dict[str, str]  # by complex, empty where none has one
    sge_binaries: str
    sge_shepherd: str
    sge_slave_tasks: bool
    slurm_device_selection: str
    slurm_shards: str
    slurm_binaries: str
    slurm_conf: str
    slurm_wait: float
    exporter_dir: str  # beside LOCK_DIR: the exporter's sample and inventory
    exporter_listen: tuple[str, ...]
    web_config: str
    sample_period: float
    process_period: float  # by the sample period, between two reads of the GPUs' process lists
    max_sample_age: float  # by the sample period: older values of the GPUs are not shown
    idle_after: float
    label_user: str
    prometheus_url: str
    user_claims: bool
    user_max: int
    claim_max: float  # seconds
    reserve_max: float
    history_days: int
    idle_warn: float
    idle_command: str
    idle_kill: float
    isolation: str
    leftover_processes: str
    quarantine_on: tuple[str, ...]
    health_command: tuple[str, ...]
    cdi_dir: str
    proc_root: str
    driver_root: str
    sys_root: str
    dev_root: str
    simulation: str
    path: str
    copy_path: str
    mps_dir: str
    given: dict[str, str]
    faults: tuple[str, ...]
    ignored: tuple[str, ...]

    def __init__(self, values: dict[str, str], path: str = "") -> None:
        """Take the defaults, then `values`; raise ValueError for an unknown key or bad value."""
        self.path, self.given, self.faults, self.ignored = path, values.copy(), (), ()
        for name, kind, default, _ in KEYS + SEAMS:
            if name in values:
                setattr(self, name.lower(), convert_setting(kind, default, values.pop(name)))
                continue
            if (kind, default) not in DEFAULTS:
                DEFAULTS[kind, default] = convert_setting(kind, default, None)
            setattr(self, name.lower(), DEFAULTS[kind, default])
        for name in values:
            raise ValueError(f"unknown key {name}")
        self.sge_kinds = {}
        if "=" in self.given.get("SGE_COMPLEXES", ""):
            from gpulock.node.kinds import parse_sge_complexes

            self.sge_kinds = parse_sge_complexes(self.given["SGE_COMPLEXES"])
        self.exporter_dir = f"{self.lock_dir.rstrip('/')}-exporter"
        kept = SAMPLES_KEPT * self.sample_period
        self.max_sample_age = max(SHORTEST_SAMPLE_AGE, kept)
        self.process_period = min(LONGEST_PROCESS_PERIOD, kept)
        self.copy_path = f"{self.state_dir}/settings.obeyed"
        self.mps_dir = f"{self.state_dir}-mps"
        shards = self.slurm_shards == "share"  # of a card, of which Slurm alone knows how many
        if self.share_users != "one" or self.isolation != "off" or shards:
            self.share_mps = False  # MPS serves one user, who opens through it what a job may not
        if self.isolation != "off" or self.share_mps:
            self.visible_devices = "uuid"  # CUDA counts only the devices that it can open, or MPS

    def root_uid(self) -> int:
        """Return whose processes are taken for root's: in a simulation those of its user."""
        return os.geteuid() if self.simulation else 0


def convert_setting(kind: str, default: str, given: "str | None") -> object:
    """Return the value of one key; raise ValueError that says what is wrong."""
    choices = {CHOICE: default.split("|"), FLAG: ["yes", "no"]}.get(kind, [])
    value = given if given is not None else choices[0] if kind == CHOICE else default
    if choices and value not in choices:
        raise ValueError(f"must be {' or '.join(choices)}, not {value!r}")
    if kind == COUNT:
        if not (value.isascii() and value.isdigit() and len(value) <= COUNT_DIGITS):
            raise ValueError(
                f"must be a whole number of at most {COUNT_DIGITS} digits, not {value!r}"
            )
        return int(value)
    if kind in (SECONDS, PERIOD, LIMIT):
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"must be a number of seconds, not {value!r}") from None
        short = number < SHORTEST_PERIOD if kind == PERIOD else number <= 0
        if not (number <= MOST_SECONDS and not short) and (kind, value) != (LIMIT, "0"):
            words = {LIMIT: "0, or more than 0", PERIOD: f"at least {SHORTEST_PERIOD}"}
            least = words.get(kind, "more than 0")
            raise ValueError(
                f"must be {least} and at most {MOST_SECONDS:,.0f} seconds, not {value!r}"
            )
        return number
    if kind == PATH and (value or default) and (value[:1] != "/" or (default and value == "/")):
        raise ValueError(f"must be an absolute path, and not / itself: {value!r}")
    if kind == PLACES and value:
        from gpulock.node.shares import parse_share_words

        return parse_share_words(value)
    if kind == KINDS and "=" in value:
        from gpulock.node.kinds import parse_sge_complexes

        return tuple(parse_sge_complexes(value))
    if kind in (WORDS, KINDS, PLACES):
        return tuple(value.split())
    return value == "yes" if kind == FLAG else value


def parse_value(given: str, kind: str) -> str:
    """Return the value that stands behind `=`, without its quotes; raise ValueError."""
    value = given.strip()
    quote = value[0] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else ""
    if quote:
        value = value[1:-1]  # a shell or systemd may read the file as well
    if " #" in given.replace("\t", " ") and (not quote or quote in value):
        raise ValueError("must have no comment behind it: write that on a line of its own")
    words = value.replace("\t", " ") if kind in (WORDS, KINDS, PLACES) else value
    if not words.isprintable():
        raise ValueError(f"must have printable characters only, not {value[:60]!r}")
    return value


def parse_settings(text: str, path: str, fixed: bool = False) -> Settings:
    """Parse a settings file; raise ValueError with `path:line` for the first fault.

    An unknown key may be another version's: it is told in `faults`, and not obeyed. So are the two
    folders where they are `fixed`, as in the file of a real node.
    """
    known = {key[0]: key for key in KEYS + SEAMS}
    values: dict[str, str] = {}
    ignored: list[str] = []
    faults: list[str] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, given = line.partition("=")
        name, fault = name.strip(), ""
        if not equals:
            raise ValueError(f"{path}:{number}: not KEY=VALUE: {line[:60]!r}")
        if name not in known:
            fault = f"{path}:{number}: unknown key {name!r}"
            if not (name.isascii() and name.isupper() and name.replace("_", "").isalnum()):
                raise ValueError(fault)
        elif fixed and name in FIXED:
            folder = known[name][2]
            fault = (
                f"{path}:{number}: {name} cannot be set here: it is {folder}, bind that elsewhere"
            )
        if fault:
            ignored.append(name)
            faults.append(fault)
            continue
        if name in values:
            raise ValueError(f"{path}:{number}: {name} is given twice")
        try:
            values[name] = parse_value(given, known[name][1])
            convert_setting(known[name][1], known[name][2], values[name])
        except ValueError as wrong:
            raise ValueError(f"{path}:{number}: {name} {wrong}") from None
    settings = Settings(values, path)
    for excluded, needs in (
        (settings.share_users != "one", "SHARE_USERS=one: MPS serves one user a card"),
        (settings.isolation != "off", "ISOLATION=off: through the MPS its user opens every GPU"),
        (settings.slurm_shards == "share", "SLURM_SHARDS=refuse: shards have no MPS"),
    ):
        if excluded and settings.given.get("SHARE_MPS") == "yes":
            faults.append(f"{path}: SHARE_MPS=yes needs {needs}")
    if settings.given.get("VISIBLE_DEVICES") == "index" != settings.visible_devices:
        faults.append(f"{path}: VISIBLE_DEVICES=index needs ISOLATION=off and SHARE_MPS=no")
    settings.faults, settings.ignored = tuple(faults), tuple(ignored)
    return settings
