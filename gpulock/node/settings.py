# SPDX-License-Identifier: Apache-2.0
"""The configuration of this node, read from gpulock.conf by the table of keys.

Hot. Precedence: default < file < option. The environment never configures anything: a hook runs
as root with an environment that a job's owner wrote. A file that root obeys must be root's and
writable by no other user.
"""

import os
import stat

from gpulock.errors import BROKEN, Refusal
from gpulock.node.config_schema import KEYS, convert_setting
from gpulock.store import atomic

DEFAULT_PATH = "/etc/gpulock/gpulock.conf"


class Settings:
    """One value a key, in lower case; see keys.KEYS for the meaning."""

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

    def __init__(self, values: dict[str, str], path: str = "") -> None:
        """Take the defaults, then `values`; raise ValueError for an unknown key or bad value."""
        self.path = path
        for name, kind, default, _ in KEYS:
            setattr(self, name.lower(), convert_setting(kind, default, values.pop(name, None)))
        for name in values:
            raise ValueError(f"unknown key {name}")
        if self.isolation != "off":
            self.visible_devices = "uuid"  # CUDA counts only the devices that it can open


def parse_settings(text: str, path: str) -> Settings:
    """Parse a settings file; raise ValueError with `path:line` for the first fault."""
    known = {key[0]: key for key in KEYS}
    values: dict[str, str] = {}
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
            raise ValueError(f"{path}:{number}: unknown key {name!r}")
        if name in values:
            raise ValueError(f"{path}:{number}: {name} is given twice")
        try:
            convert_setting(known[name][1], known[name][2], value)
        except ValueError as fault:
            raise ValueError(f"{path}:{number}: {name} {fault}") from None
        values[name] = value
    return Settings(values, path)


def read_settings(path: str, uid: int | None = None) -> Settings:
    """Read the settings of this node; raise Refusal(BROKEN) where they cannot be believed.

    A missing default file means the defaults; any other missing file is an error. The file must
    belong to root or to `uid` (the caller) and be writable by no other user.
    """
    caller = os.geteuid() if uid is None else uid
    try:
        info = os.stat(path)
        if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{path}: belongs to uid {info.st_uid}, mode {info.st_mode & 0o7777:o}, and must be"
                " root's or the caller's and writable by no other user"
            )
        settings = parse_settings(atomic.read_text(os.path.realpath(path)), path)
    except FileNotFoundError:
        if path != DEFAULT_PATH:
            raise Refusal(BROKEN, f"no settings file {path}", "run gpulock doctor") from None
        settings = Settings({}, path)
    except OSError as fault:
        raise Refusal(BROKEN, f"settings: {path}: {fault.strerror}", "name a file") from fault
    except ValueError as fault:
        raise Refusal(BROKEN, f"settings: {fault}", "correct the file") from fault
    check_simulation_marker(settings, caller)
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
