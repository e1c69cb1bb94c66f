# SPDX-License-Identifier: Apache-2.0
"""What doctor says of ISOLATION: what this node can do, and whether what is set holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.doctor.check import INSTALLED, Check, Finding, fact, fault, warning
from gpulock.isolation import bpf, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.node.settings import Settings
from gpulock.store import atomic

NAME = "isolation"
SEE = "see docs/isolation.md"
PAM_STACK = Path("/etc/pam.d/slurm")
SESSION = "slurm-session"  # the hook that pam_exec runs
USER_ENVIRON = "user_readenv=1"  # of pam_env(8): ~/.pam_environment, which pam_exec passes on


def isolation_checks(settings: Settings, slurm: bool, pam: Path = PAM_STACK) -> list[Check]:
    """Return the checks of ISOLATION, with `slurm` those of its step daemons' stack `pam`."""
    first = Check(NAME, lambda: check_device_programs(settings), (INSTALLED,))
    if settings.isolation == "off":
        return [first]
    logins = Check(f"{NAME}: logins", lambda: check_login_bypass(settings), (NAME,))
    stack = Check(f"{NAME}: PAM", lambda: check_step_sessions(pam), (NAME,))
    return [first, logins, *([stack] if slurm else [])]


def check_device_programs(settings: Settings) -> Iterator[Finding]:
    """Look at the cgroups, and at the right to load a program that closes devices."""
    yield fact(f"ISOLATION={settings.isolation}")
    if settings.isolation == "off":
        return
    try:
        tree.find_cgroup_top(settings.sys_root)
    except Refusal as refusal:
        yield fault(refusal.why, refusal.do)
        return
    try:
        os.close(bpf.load_device_program(bpf.assemble_device_program(CLOSE_ALL_GPUS)))
    except OSError as refused:
        do = "hooks need CAP_BPF and CAP_NET_ADMIN, and a kernel with CONFIG_CGROUP_BPF"
        yield fault(f"no device program can be loaded: {refused.strerror or refused}", do)


def check_login_bypass(settings: Settings) -> Iterator[Finding]:
    """Look whether logins, cron and at are closed: a user starts programs past a job by them."""
    top = tree.find_cgroup_top(settings.sys_root)
    if not sessions.login_cgroups(top):
        what = "no cgroup of logins, cron or at: they open every GPU where users have them"
        yield warning(what, SEE)
    elif left := sessions.unclosed_login_cgroups(top):
        names = " ".join(map(os.path.basename, left))
        do = "start gpulockd, or run gpulock reap, and look whether that says why"
        yield fault(f"no program of gpulock closes {names}: it opens every GPU", do)


def read_pam_stack(pam: Path, depth: int = 4) -> list[list[str]]:
    """Return the words of each line of a PAM stack and of what it includes; raise OSError."""
    try:
        text = atomic.read_text(os.path.realpath(pam))
    except FileNotFoundError:
        return []
    stack: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].split()
        stack.append(words)
        if depth and not {"@include", "include", "substack"}.isdisjoint(words[:2]):
            stack += read_pam_stack(pam.parent / words[-1], depth - 1)
    return stack


def check_step_sessions(pam: Path) -> Iterator[Finding]:
    """Look whether the PAM stack of Slurm's step daemons runs our hook."""
    lines = read_pam_stack(pam)
    if steered := [words for words in lines if USER_ENVIRON in words]:
        what = f"{pam} takes variables from users' files: any user's LD_PRELOAD runs as root"
        yield fault(what, f"take {USER_ENVIRON} out of: {' '.join(steered[0])}")
        return
    ours = [words[:2] for words in lines if any(SESSION in word for word in words)]
    if ["session", "required"] not in ours:
        what = f"{pam} does not run {SESSION}: no task of any job starts"
        yield fault(
            what, f"put the two lines of docs/isolation.md into {pam}; UsePAM=1 in slurm.conf"
        )
