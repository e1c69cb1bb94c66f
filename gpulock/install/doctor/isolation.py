# SPDX-License-Identifier: Apache-2.0
"""What doctor says of ISOLATION: what this node can do, and whether what is set holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.doctor.check import Check, examine, fault, good, warning
from gpulock.isolation import bpf, group, sessions, tree
from gpulock.isolation.group import SWITCH
from gpulock.isolation.job import CGROUP, GROUP
from gpulock.isolation.policy import NOTHING
from gpulock.isolation.tree import V2, Tree
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store import atomic

NAME = "isolation"
SEE = "see docs/isolation.md"
PAM_STACK = Path("/etc/pam.d/slurm")
SESSION = "slurm-session"  # the hook that pam_exec runs
EXECD, SLURMD = "sge_execd", "slurmd"
_LOGINS = "/user.slice/"


def isolation_checks(settings: Settings, pam: Path = PAM_STACK) -> list[Check]:
    """Return the checks of ISOLATION; `pam` is the stack of Slurm's step daemons."""
    return examine(NAME, lambda: looks(settings, pam))


def looks(settings: Settings, pam: Path) -> Iterator[Check]:
    """Look at what is set, or say what could be."""
    if settings.isolation == CGROUP:
        yield from by_cgroup(settings, pam)
    elif settings.isolation == GROUP:
        yield from by_group(settings)
    else:
        yield good(NAME, f"off; this node can do {', '.join(possible(settings)) or 'none'}")


def possible(settings: Settings) -> list[str]:
    """Return the values of ISOLATION that could work here."""
    found: list[str] = []
    try:
        versions = [f"version {one.version}" for one in tree.trees(settings.sys_root)]
        found.append(f"cgroup ({' and '.join(versions)})")
    except Refusal:
        pass
    try:
        group.check_driver(settings.driver_root)
        found.append("group (Grid Engine)")
    except Refusal as refusal:
        if SWITCH in refusal.do:
            found.append(f"group (Grid Engine; {refusal.do} first)")
    return found


def by_cgroup(settings: Settings, pam: Path) -> Iterator[Check]:
    """Look at the cgroups, the right to load programs, the daemons' places, the ways round."""
    try:
        found = tree.trees(settings.sys_root)
    except Refusal as refusal:
        yield fault(NAME, refusal.why, refusal.do)
        return
    second = next((one for one in found if one.version == V2), None)
    versions = " and ".join(str(one.version) for one in found)
    if second is not None and os.geteuid() != 0:
        yield warning(NAME, f"cgroup, version {versions}: root can tell more", "run it as root")
        return
    if why := why_no_program(second):
        do = "hooks need CAP_BPF and CAP_NET_ADMIN, and a kernel with CONFIG_CGROUP_BPF"
        yield fault(NAME, f"no device program can be loaded: {why}", do)
        return
    yield good(NAME, f"cgroup, version {versions}")
    yield from ways_round(found, second)
    yield from daemons(Proc(settings.proc_root), found, pam)


def why_no_program(second: Tree | None) -> str:
    """Return why the kernel takes no program of ours, or nothing."""
    if second is None:
        return ""
    try:
        os.close(bpf.load(bpf.assemble(NOTHING)))
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def ways_round(found: list[Tree], second: Tree | None) -> Iterator[Check]:
    """Look whether what a user starts past his job can be closed."""
    name = f"{NAME}: logins"
    if second is None:
        what = "logins, cron and systemd-run --user open every GPU: closing them takes version 2"
        yield warning(name, what, SEE)
    elif not sessions.places(found):
        what = "no user.slice: logins, cron and at open every GPU"
        yield warning(name, f"{what} where users have them", SEE)
    elif left := sessions.left_open(found):
        what = f"no program of ours closes {names(left)}: who is there opens every GPU"
        yield fault(
            name, what, "start gpulockd, or run gpulock reap, and look whether that says why"
        )
    else:
        yield good(name, f"closed: {names(sessions.places(found))}")


def names(folders: list[str]) -> str:
    """Return the services and slices of these cgroups."""
    return " ".join(map(os.path.basename, folders))


def daemons(proc: Proc, found: list[Tree], pam: Path) -> Iterator[Check]:
    """Look where the schedulers' daemons run: their jobs' cgroups are made below."""
    for pid, daemon in running(proc):
        yield from place(proc, found, pid, daemon)
        if daemon == SLURMD:
            yield from step_sessions(pam)


def running(proc: Proc) -> list[tuple[int, str]]:
    """Return the schedulers' daemons that run here: root's, for anybody may use their names."""
    found: list[tuple[int, str]] = []
    for pid in proc.pids():
        try:
            status = proc.status(pid)
        except (OSError, ValueError):
            continue
        if status.name in (EXECD, SLURMD) and status.uids[0] == 0:
            found.append((pid, status.name))
    return found


def place(proc: Proc, found: list[Tree], pid: int, daemon: str) -> Iterator[Check]:
    """Look at the cgroup of one daemon."""
    name = f"{NAME}: {daemon}"
    folders = [tree.folder_of(one, proc, pid) for one in found]
    if any(_LOGINS in f"{folder}/" for folder in folders):
        what = f"{daemon} runs in a login's cgroup, where every GPU is closed to users"
        yield fault(name, what, f"start {daemon} as a service")
    elif any(folder == one.top for folder, one in zip(folders, found, strict=True)):
        what = f"{daemon} has no cgroup of its own: to stop it does not stop its jobs"
        yield warning(name, what, "run it as a systemd service with Delegate=yes")
    else:
        yield good(name, f"jobs are confined below {folders[-1]}")


def step_sessions(pam: Path) -> Iterator[Check]:
    """Look whether Slurm's step daemons open a session of ours."""
    name = f"{NAME}: PAM"
    try:
        lines = atomic.read_text(os.path.realpath(pam)).splitlines()
    except FileNotFoundError:
        lines = []
    ours = [line.split() for line in lines if SESSION in line and not line.startswith("#")]
    right = [words for words in ours if words[:2] == ["session", "required"]]
    if right:
        yield good(name, f"{pam}: {' '.join(right[0])}")
    else:
        what = f"{pam} does not run {SESSION}: no task of any job starts"
        yield fault(name, what, "UsePAM=1 in slurm.conf, and the lines of docs/isolation.md there")


def by_group(settings: Settings) -> Iterator[Check]:
    """Look whether the driver leaves its nodes alone."""
    try:
        group.check_driver(settings.driver_root)
    except Refusal as refusal:
        yield fault(NAME, refusal.why, refusal.do)
        return
    yield good(NAME, "group: the driver leaves owner and mode of its nodes alone")
    if SLURMD in dict(running(Proc(settings.proc_root))).values():
        what = "ISOLATION=group under Slurm, which gives a job no group of its own: all are refused"
        yield fault(NAME, what, "set ISOLATION=cgroup, or ConstrainDevices=yes in cgroup.conf")
