# SPDX-License-Identifier: Apache-2.0
"""What the lab's Grid Engine is told before its first start: classic spooling is text files."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.labs.sge.install import ADMIN, INSTALLATION
from tests.support.pairs import zip_equal

CELL: Final = "gpulock"
# Inside the lab's own network namespaces, so they are free whatever runs on the host.
SERVICES: Final = "sge_qmaster 7444/tcp\nsge_execd 7445/tcp\n"
_DEFAULTS: Final = """\
mailer /usr/bin/mail
xterm /usr/bin/xterm
load_sensor none
prolog none
epilog none
shell_start_mode posix_compliant
login_shells bash,sh,ksh,csh,tcsh
min_uid 1000
min_gid 1000
user_lists none
xuser_lists none
projects none
xprojects none
enforce_project false
enforce_user auto
max_unheard 00:05:00
reschedule_unknown 00:00:00
set_token_cmd none
pag_cmd none
token_extend_time none
shepherd_cmd none
qmaster_params none
execd_params none
gid_range 65400-65500
qlogin_command builtin
qlogin_daemon builtin
rlogin_command builtin
rlogin_daemon builtin
rsh_command builtin
rsh_daemon builtin
max_aj_instances 2000
max_aj_tasks 75000
max_u_jobs 0
max_jobs 0
auto_user_oticket 0
auto_user_fshare 0
auto_user_default_project none
auto_user_delete_time 86400
delegated_file_staging false
reprioritize 0
jsv_url none
jsv_allowed_mod ac,h,i,e,o,j,M,N,p,w
"""
# What an installation begins with; hooks and jobs log at once, and nothing is mailed. With each
# report execd reads its configuration and its sensor, and qmaster hears that a job's node is clean.
_GLOBAL: Final[dict[str, str]] = {
    **{line.split()[0]: line.split(None, 1)[1] for line in _DEFAULTS.splitlines()},
    "conf_version": "0",
    "administrator_mail": "none",
    "load_report_time": "00:00:01",
    "loglevel": "log_info",
    "finished_jobs": "1000",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01"
    " accounting_flush_time=00:00:00 joblog=false sharelog=00:00:00",
}

# Jobs start at once (1 is the shortest flush, 0 is never), and no load is made up for new ones.
SCHEDULER: Final = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "job_load_adjustments": "NONE",
}

# What `spoolinit classic` makes.
_SPOOLED: Final = (
    *("admin_hosts", "advance_reservations", "calendars", "centry", "ckpt", "cqueues"),
    *("exec_hosts", "hostgroups", "job_scripts", "jobs", "pe", "projects", "qinstances"),
    *("resource_quotas", "submit_hosts", "users", "usersets", "zombies"),
)

COMPLEXES: Final = {
    "gpu": "INT <= YES YES 0 0",
    "gpuj": "INT <= YES JOB 0 0",
}
# Slots on each node. Queues are added with qconf: read from the spool they have no instances.
QUEUES: Final = {"gpu.q": 8, "cpu.q": 4}
EXECHOST_VALUES: Final = "gpu=8,gpuj=8,slots=16"


def table(values: dict[str, str]) -> str:
    """Render keys and values the way Grid Engine reads them back."""
    return "".join(f"{key:<32} {value}\n" for key, value in values.items())


def complex_fields(name: str, line: str) -> dict[str, str]:
    """Split `TYPE RELOP REQUESTABLE CONSUMABLE DEFAULT URGENCY` into a complex's spool file."""
    keys = ("type", "relop", "requestable", "consumable", "default", "urgency")
    return {"name": name, "shortcut": name, **dict(zip_equal(keys, line.split()))}


def parallel_environment(name: str, rule: str) -> dict[str, str]:
    """Describe a tightly integrated parallel environment."""
    own = {"qsort_args": "NONE"}
    if INSTALLATION.is_ocs:
        own = {"master_forks_slaves": "FALSE", "daemon_forks_slaves": "FALSE"}
        own |= {"ign_sreq_on_mhost": "FALSE"}
    return {
        "pe_name": name,
        "slots": "999",
        "user_lists": "NONE",
        "xuser_lists": "NONE",
        "start_proc_args": "NONE",
        "stop_proc_args": "NONE",
        "allocation_rule": rule,
        "control_slaves": "TRUE",
        "job_is_first_task": "FALSE",
        "urgency_slots": "min",
        "accounting_summary": "FALSE",
        **own,
    }


def queue(name: str, nodes: Sequence[str], slots: int, sequence: int) -> dict[str, str]:
    """Return what differs from this Grid Engine's own template of a queue: no hooks, no limits."""
    return {
        "qname": name,
        "hostlist": " ".join(nodes),
        "seq_no": str(sequence),
        "load_thresholds": "NONE",
        "pe_list": "smp mpi",
        "slots": str(slots),
        # Private to each node: execd makes and removes <tmpdir>/JOB.TASK.QUEUE on every host.
        "tmpdir": "/run/tmp",
        "shell": "/bin/bash",
        "shell_start_mode": "unix_behavior",
    }


def edited(text: str, changes: dict[str, str]) -> str:
    """Return what qconf showed of an object with some lines changed, for qconf to read back."""
    lines = text.replace("\\\n", " ").splitlines()
    kept = [line for line in lines if line and line.split()[0] not in changes]
    return "\n".join(line for line in kept if line[0] != "#") + "\n" + table(changes)


def exechost(node: str) -> dict[str, str]:
    """Describe an execution host with the lab's consumables."""
    return {
        "hostname": node,
        "load_scaling": "NONE",
        "complex_values": EXECHOST_VALUES,
        "load_values": "NONE",
        "processors": "0",
        "user_lists": "NONE",
        "xuser_lists": "NONE",
        "projects": "NONE",
        "xprojects": "NONE",
        "usage_scaling": "NONE",
        "report_variables": "NONE",
    }


def gid_range(lab: Path, number: int, count: int = 100) -> str:
    """Return a node's own range: on one kernel no two nodes, of any lab, may hand out one gid.

    Nor may one be a real group's: a shepherd ends what has its job's group (facts/grid-engine.md).
    """
    first = 1_000_000 + zlib.crc32(os.fsencode(lab)) % 100_000 * 1000 + number * 100
    return f"{first}-{first + count - 1}"


def write_root(lab: Path, master: str) -> None:
    """Write a private SGE_ROOT: the installation's programs, and a cell of its own."""
    root = lab / "root"
    common = root / CELL / "common"
    common.mkdir(parents=True)
    made = INSTALLATION
    for folder, real in (
        ("bin", made.programs),
        ("lib", made.libraries),
        ("utilbin", made.utilities),
    ):
        (root / folder).mkdir()
        (root / folder / made.architecture).symlink_to(real)
    (root / "util").symlink_to(made.util)
    (common / "act_qmaster").write_text(f"{master}\n")
    bootstrap = {
        "admin_user": ADMIN,
        "default_domain": "none",
        "ignore_fqdn": "false",
        "spooling_method": "classic",
        "spooling_lib": "libspoolc",
        "spooling_params": f"{common};{lab / 'spool/qmaster'}",
        "binary_path": made.binary_path,
        "qmaster_spool_dir": str(lab / "spool/qmaster"),
        "security_mode": "none",
        "listener_threads": "2",
        "worker_threads": "2",
        "scheduler_threads": "1",
        **({"reader_threads": "2", "communication_params": "none"} if INSTALLATION.is_ocs else {}),
    }
    (common / "bootstrap").write_text("# Version: 6.2\n" + table(bootstrap))


def write_spool(lab: Path, master: str, nodes: Sequence[str]) -> None:
    """Write what qmaster reads at its start: hosts, queues, complexes, configuration."""
    common, spool = lab / "root" / CELL / "common", lab / "spool/qmaster"
    values = {**_GLOBAL, "execd_spool_dir": str(lab / "spool")}
    if INSTALLATION.is_ocs:  # it starts no hook of root's under a limit, and drops LD_PRELOAD
        values |= {"min_uid": "0", "min_gid": "0"}
        values["qmaster_params"] = "ENABLE_SUBMIT_LD_PRELOAD=1 ENABLE_SUBMIT_LIB_PATH=1"
    (common / "configuration").write_text(table({"conf_name": "global", **values}))
    for folder in _SPOOLED:
        (spool / folder).mkdir(parents=True, exist_ok=True)
    for number, node in enumerate(nodes, 1):
        local = {"conf_name": node, "conf_version": "0", "gid_range": gid_range(lab, number)}
        _put(common / "local_conf", node, local)
        _put(spool / "exec_hosts", node, exechost(node))
    for host in (master, *nodes):
        _put(spool / "admin_hosts", host, {"hostname": host})
        _put(spool / "submit_hosts", host, {"hostname": host})
    for name in ("centry", "usersets"):
        source = INSTALLATION.util / "resources" / name
        shutil.copytree(source, spool / name, dirs_exist_ok=True)
    for name in ("jobseqnum", "arseqnum"):
        (spool / name).write_text("0\n")
    for name, line in COMPLEXES.items():
        _put(spool / "centry", name, complex_fields(name, line))
    _put(spool / "pe", "smp", parallel_environment("smp", "$pe_slots"))
    _put(spool / "pe", "mpi", parallel_environment("mpi", "$round_robin"))
    (spool / "managers").write_text(f"root\n{ADMIN}\n")


def _put(folder: Path, name: str, values: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(table(values))
