# SPDX-License-Identifier: Apache-2.0
"""What doctor says of ISOLATION: what this node can do, and whether what is set holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.doctor.check import Check, fault, ok, run_checks, warning
from gpulock.isolation import bpf, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.isolation.tree import V2, CgroupHierarchy
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store import atomic

NAME = "isolation"
SEE = "see docs/isolation.md"
PAM_STACK = Path("/etc/pam.d/slurm")
SESSION = "slurm-session"  # the hook that pam_exec runs
EXECD, SLURMD = "sge_execd", "slurmd"
USER_ENVIRON = "user_readenv=1"  # of pam_env(8): ~/.pam_environment, which pam_exec passes on
_LOGINS = "/user.slice/"


def isolation_checks(settings: Settings, pam: Path = PAM_STACK) -> list[Check]:
    """Return the checks of ISOLATION; `pam` is the stack of Slurm's step daemons."""
    return run_checks(NAME, lambda: check_isolation_setting(settings, pam))


def check_isolation_setting(settings: Settings, pam: Path) -> Iterator[Check]:
    """Look at what is set, or say what could be."""
    if settings.isolation != "off":
        yield from check_cgroup_isolation(settings, pam)
        return
    try:
        found = tree.find_hierarchies(settings.sys_root)
    except Refusal as refusal:
        yield ok(f"off; this node cannot do cgroup: {refusal.why}")
        return
    yield ok(f"off; this node can do cgroup ({cgroup_versions(found)})")


def cgroup_versions(found: list[CgroupHierarchy]) -> str:
    """Return the versions of these hierarchies."""
    return f"version {' and '.join(str(one.version) for one in found)}"


def check_cgroup_isolation(settings: Settings, pam: Path) -> Iterator[Check]:
    """Look at the cgroups, the right to load programs, the daemons' places, the ways round."""
    try:
        found = tree.find_hierarchies(settings.sys_root)
    except Refusal as refusal:
        yield fault(refusal.why, refusal.do)
        return
    second = next((one for one in found if one.version == V2), None)
    versions = cgroup_versions(found)
    if second is not None and os.geteuid() != 0:
        yield warning(f"cgroup, {versions}: only root sees more", "run it as root")
        return
    if why := why_no_device_program(second):
        do = "hooks need CAP_BPF and CAP_NET_ADMIN, and a kernel with CONFIG_CGROUP_BPF"
        yield fault(f"no device program can be loaded: {why}", do)
        return
    yield ok(f"cgroup, {versions}")
    yield from check_login_bypass(found, second)
    proc = Proc(settings.proc_root)
    for pid, daemon in running_scheduler_daemons(proc):
        yield check_daemon_cgroup(proc, found, pid, daemon)
        if daemon == SLURMD:
            yield check_step_sessions(pam)
            if second is not None:
                yield check_launcher(proc, second, pid)


def why_no_device_program(second: CgroupHierarchy | None) -> str:
    """Return why the kernel takes no program of ours, or nothing."""
    if second is None:
        return ""
    try:
        os.close(bpf.load_device_program(bpf.assemble_device_program(CLOSE_ALL_GPUS)))
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def check_login_bypass(
    found: list[CgroupHierarchy], second: CgroupHierarchy | None
) -> Iterator[Check]:
    """Look whether what a user starts past a job can be closed."""
    name = f"{NAME}: logins"
    if second is None:
        what = "logins, cron and systemd-run --user open every GPU: closing them takes version 2"
        yield warning(what, SEE, name)
    elif not sessions.login_cgroups(found):
        what = "no user.slice: logins, cron and at open every GPU where users have them"
        yield warning(what, SEE, name)
    elif left := sessions.unclosed_login_cgroups(found):
        what = f"no program of gpulock closes {cgroup_names(left)}: it opens every GPU"
        do = "start gpulockd, or run gpulock reap, and look whether that says why"
        yield fault(what, do, name)
    else:
        yield ok(f"closed: {cgroup_names(sessions.login_cgroups(found))}", name)


def cgroup_names(folders: list[str]) -> str:
    """Return the services and slices of these cgroups."""
    return " ".join(map(os.path.basename, folders))


def running_scheduler_daemons(proc: Proc) -> list[tuple[int, str]]:
    """Return the schedulers' daemons that run here: root's, for anybody may use their names."""
    found: list[tuple[int, str]] = []
    for pid in proc.pids():
        try:
            status = proc.status(pid)
        except (OSError, ValueError):
            continue
        name = status.name.partition("-")[0]  # Debian's slurmd-wlm
        if name in (EXECD, SLURMD) and status.uids[0] == 0:
            found.append((pid, name))
    return found


def check_daemon_cgroup(proc: Proc, found: list[CgroupHierarchy], pid: int, daemon: str) -> Check:
    """Look at the cgroup of one daemon: jobs are below it, or below one that slurmd asked for."""
    name = f"{NAME}: {daemon}"
    folders = [tree.service_cgroup_folder(one, proc, pid) for one in found]
    if any(_LOGINS in f"{folder}/" for folder in folders):
        what = f"{daemon} runs in a login's cgroup, where every GPU is closed to users"
        return fault(what, f"start {daemon} as a service", name)
    if any(folder == one.top for folder, one in zip(folders, found)):
        what = f"{daemon} has no cgroup of its own: to stop it does not stop its jobs"
        return warning(what, "run it as a systemd service with Delegate=yes", name)
    return ok(f"it has a cgroup of its own: {folders[-1]}", name)


def check_launcher(proc: Proc, second: CgroupHierarchy, pid: int) -> Check:
    """Look whether slurmd, which runs users' login files, is where no user opens a GPU."""
    name = f"{NAME}: login files"
    folder = tree.process_cgroup_folder(second, proc, pid)
    if tree.is_launcher_cgroup(folder) and bpf.has_device_program(folder):
        return ok("slurmd runs them where no user opens a GPU", name)
    return ok("the next job's Prolog closes slurmd's cgroup, before slurmd runs one", name)


def read_pam_stack(pam: Path, depth: int = 4) -> list[list[str]]:
    """Return the words of each line of a PAM stack and of what it includes; raise OSError."""
    try:
        text = atomic.read_text(os.path.realpath(pam))
    except FileNotFoundError:
        return []
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].split()
        found.append(words)
        if depth and not {"@include", "include", "substack"}.isdisjoint(words[:2]):
            found += read_pam_stack(pam.parent / words[-1], depth - 1)
    return found


def check_step_sessions(pam: Path) -> Check:
    """Look whether Slurm's step daemons open a session of ours."""
    name = f"{NAME}: PAM"
    lines = read_pam_stack(pam)
    if steered := [words for words in lines if USER_ENVIRON in words]:
        what = f"{pam} takes variables from users' files: any user's LD_PRELOAD runs as root"
        return fault(what, f"take {USER_ENVIRON} out of: {' '.join(steered[0])}", name)
    ours = [words for words in lines if any(SESSION in word for word in words)]
    if right := [words for words in ours if words[:2] == ["session", "required"]]:
        return ok(f"{pam}: {' '.join(right[0])}", name)
    what = f"{pam} does not run {SESSION}: no task of any job starts"
    return fault(what, "UsePAM=1 in slurm.conf, and the lines of docs/isolation.md there", name)
