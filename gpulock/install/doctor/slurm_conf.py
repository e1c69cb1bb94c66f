# SPDX-License-Identifier: Apache-2.0
"""What doctor says of Slurm's configuration in force: hooks, flags, exit codes, times."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import OK, Check, fault_check, ok_check, run_checks, warning_check
from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.configured_hooks import (
    EPILOG,
    PATHS,
    PROLOG,
    TASK,
    InForceHook,
    find_slurm_hook,
    misplaced_program,
)
from gpulock.install.slurm.site import SlurmError, SlurmSite
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.install.slurm.texts import (
    SlurmSettingAdvice,
    hook_seconds,
    opens_pam_sessions,
    slurm_setting_advice,
)
from gpulock.install.trial import rival_hook_reason, why_users_cannot_run
from gpulock.node.settings import Settings

RECONFIGURE: Final = "then scontrol reconfigure"
_SHOW: Final = "gpulock install slurm --dry-run shows the lines for slurm.conf"
_MESSAGE_SECONDS: Final = 10  # MessageTimeout's default
_WITHOUT: Final = {
    PROLOG: "its jobs get no lock",
    TASK: "tasks get no mask, and a refused job runs",
    EPILOG: "no lock is given back",
}


class SlurmConfChecks:
    """The configuration in force; each method yields the checks of one thing."""

    def __init__(
        self, settings: Settings, site: SlurmSite, conf: SlurmConf, paths: HookPaths
    ) -> None:
        self.settings = settings
        self.site = site
        self.conf = conf
        self.paths = paths
        self.wants = {want.key: want for want in slurm_setting_advice(conf, settings)}

    def checks(self) -> list[Check]:
        """Return all checks of the configuration."""
        looks = {
            PROLOG: lambda: self.hook(PROLOG),
            TASK: lambda: self.hook(TASK),
            EPILOG: lambda: self.hook(EPILOG),
            "PrologFlags": self.flags,
            "RequeueExit": self.requeue,
            "PrologEpilogTimeout": self.timeouts,
            "ProctrackType": self.tracking,
            "SelectType": self.selection,
            "JobSubmitPlugins": self.submission,
            "LaunchParameters": self.interactive,
            "SchedulerParameters": self.held,
            "UsePAM": self.sessions,
            "node": self.node,
        }
        return [check for name, look_at in looks.items() for check in run_checks(name, look_at)]

    def hook(self, key: str) -> Iterator[Check]:
        """Look whether one hook of ours is in force, can be run, and is in its place."""
        found = find_slurm_hook(self.conf, key, self.paths)
        if not found.ours:
            what = f"not ours ({found.text}): {_WITHOUT[key]}"
            if found.values and not found.programs:
                what = f"{found.text} names nothing on this node: Slurm drains it at the next job"
            yield fault_check(key, what, _SHOW)
            return
        ours = found.ours[0]
        if not os.access(ours, os.X_OK):
            yield fault_check(key, f"{ours} cannot be executed", f"chmod 755 {ours}")
        elif key == TASK and (why := why_users_cannot_run(ours)):
            yield fault_check(
                key, f"{why}: every task fails", "make it everybody's to read and execute"
            )
        elif wrong := misplaced_program(found):
            order = "before our Prolog" if key == PROLOG else "after our Epilog"
            do = f"give {ours} another name: Slurm goes in reverse alphabetical order"
            yield warning_check(
                key, f"{wrong} runs {order}: it may use GPUs that are not locked", do
            )
        else:
            yield ok_check(key, found.text)
        yield from self.rivals(found)

    def rivals(self, found: InForceHook) -> Iterator[Check]:
        """Warn of a hook of the site's that hands out GPUs itself."""
        target = PATHS[found.key](self.paths)
        for path in found.programs:
            if path in found.ours and not _is_site_wrapper(path, target):
                continue
            if why := rival_hook_reason(str(path)):
                what = f"does {path} hand out GPUs itself ({why})?"
                yield warning_check(found.key, what, "then take it out, or its part that does")

    def line(self, key: str) -> str:
        """Return what to do about a key that is to be otherwise."""
        want = self.wants[key]
        return f"in slurm.conf: {want.key}={want.value}; {RECONFIGURE}"

    def flags(self) -> Iterator[Check]:
        """Look at what makes a job's end provable, and at what slows the node down."""
        key = "PrologFlags"
        if key in self.wants:
            now = self.conf.get(key) or "none"
            what = f"{now}, without Contain: that a job without steps is over is never proven"
            yield fault_check(key, what, self.line(key))
        else:
            yield ok_check(key, self.conf.get(key))
        if self.conf.has(key, "Serial"):
            what = "Serial: one hook at a time, jobs start and end slowly"
            yield warning_check(key, what, "take Serial out; gpulock does not need it")

    def requeue(self) -> Iterator[Check]:
        """Look whether slurmctld knows the exit code that means `again later`."""
        key = "RequeueExit"
        if self.settings.requeue_exit == 0:
            yield ok_check(key, "REQUEUE_EXIT=0: a job that finds no GPU fails")
        elif key in self.wants:
            code = self.settings.requeue_exit
            what = (
                f"{self.conf.get(key) or 'none'}, without {code}: jobs that find no GPU free fail"
            )
            yield fault_check(key, what, self.line(key))
        else:
            yield ok_check(key, self.conf.get(key))

    def timeouts(self) -> Iterator[Check]:
        """Look whether Slurm leaves the hooks the time they may need."""
        key, enough = "PrologEpilogTimeout", hook_seconds(self.settings)
        want = self.wants.get(key)
        if want and want.needed:
            what = (
                f"{want.now} s: a hook may take {enough} s, and one that is killed drains the node"
            )
            yield fault_check(key, what, self.line(key))
        elif want:
            yield Check(key, OK, "none: a hook that hangs blocks the node", self.line(key))
        else:
            yield ok_check(key, self.conf.get(key))
        message = self.conf.seconds("MessageTimeout") or _MESSAGE_SECONDS
        wait = self.settings.slurm_wait + self.settings.gate_timeout
        if not self.conf.has("PrologFlags", "Alloc", "Contain", "X11") and message < wait:
            what = (
                f"{message} s: srun gives up while a Prolog waits up to {wait:.0f} s for its GPUs"
            )
            yield fault_check("MessageTimeout", what, "PrologFlags=Contain lets srun wait")

    def tracking(self) -> Iterator[Check]:
        """Warn where children of a job can outlive it."""
        key = "ProctrackType"
        found = self.conf.get(key)
        if found in ("proctrack/linuxproc", "proctrack/pgid"):
            what = f"{found}: what a job leaves behind lives on, and keeps its GPUs locked"
            yield warning_check(
                key, what, "ProctrackType=proctrack/cgroup; needs all daemons restarted"
            )
        else:
            yield ok_check(key, found or "the default")

    def selection(self) -> Iterator[Check]:
        """Look whether slurmctld hands out GPUs at all."""
        key, names = "SelectType", self.settings.slurm_gres
        if not self.conf.has("GresTypes", *names):
            what = f"GresTypes is {self.conf.get('GresTypes') or 'none'}, without {' '.join(names)}"
            do = f"GresTypes={names[0]} in slurm.conf, and Gres= of the nodes; restart all daemons"
            yield fault_check("GresTypes", f"{what}: no job can ask for GPUs", do)
        found = self.conf.get(key) or "select/cons_tres"
        if found == "select/cons_tres":
            yield ok_check(key, found)
        else:
            what = f"{found}: only --gres works, not --gpus or --gpus-per-task"
            yield warning_check(key, what, "select/cons_tres knows both; needs slurmctld restarted")

    def submission(self) -> Iterator[Check]:
        """Look at what writes the comment by which jobs are counted."""
        key, needed = "JobSubmitPlugins", self.settings.slurm_count == "comment"
        if self.settings.slurm_device_selection != "gpulock" or not needed:
            return
        if self.conf.has(key, "lua", "job_submit/lua"):
            yield ok_check(key, self.conf.get(key))
        else:
            what = (
                f"{self.conf.get(key) or 'none'}, but SLURM_COUNT=comment: any user says how many"
            )
            yield fault_check(key, what, "gpulock install slurm --dry-run shows job_submit.lua")

    def interactive(self) -> Iterator[Check]:
        """Warn of shells without a mask."""
        key = "LaunchParameters"
        if key in self.wants:
            what = "without use_interactive_step the shell of salloc gets no mask"
            yield warning_check(key, what, self.line(key))
        else:
            yield ok_check(key, self.conf.get(key))

    def sessions(self) -> Iterator[Check]:
        """Look whether step daemons open the sessions by which ISOLATION=cgroup confines them."""
        key = "UsePAM"
        if self.settings.isolation != "cgroup":
            return
        if opens_pam_sessions(self.conf):
            yield ok_check(key, self.conf.get(key))
        else:
            what = f"{self.conf.get(key) or 'not set'}: no task starts under ISOLATION=cgroup"
            yield fault_check(
                key, what, f"UsePAM=1 in slurm.conf, {RECONFIGURE}; see docs/isolation.md"
            )

    def held(self) -> Iterator[Check]:
        """Say what becomes of jobs that meet a broken node."""
        key = "SchedulerParameters"
        want: SlurmSettingAdvice | None = self.wants.get(key)
        if want:
            what = "jobs that meet a broken node are held (launch_failed_requeued_held)"
            yield Check(
                key, OK, what, f"nohold_on_prolog_fail lets them go elsewhere: {want.value}"
            )
        else:
            yield ok_check(key, "jobs that meet a broken node go elsewhere")

    def node(self) -> Iterator[Check]:
        """Say where Slurm gives this node no jobs."""
        if self.conf.source != "slurmctld":
            return
        for node in self.site.nodes or (os.uname().nodename.partition(".")[0],):
            try:
                text = self.site.scontrol("show", "node", node)
            except SlurmError as reason:
                what = f"slurmctld does not know {node}: {reason}"
                yield warning_check("node", what, "is NodeName= another? start slurmd with -N NAME")
                continue
            state = (re.search(r"\bState=(\S+)", text) or ("", "unknown"))[1]
            why = (re.search(r"\bReason=(.*)", text) or ("", "no reason given"))[1].strip()
            if any(word in state for word in ("DRAIN", "DOWN", "FAIL", "INVAL")):
                do = f"once it is repaired: scontrol update nodename={node} state=resume"
                yield warning_check("node", f"{node} is {state}: {why}", do)
            else:
                yield ok_check("node", f"{node} is {state}")


def _is_site_wrapper(path: Path, target: Path) -> bool:
    """Say whether a program is a script of the site's that calls ours."""
    return path.resolve() != target.resolve()
