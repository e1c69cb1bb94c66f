# SPDX-License-Identifier: Apache-2.0
"""What doctor says of Slurm's configuration in force: hooks, flags, exit codes, times."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from shlex import quote
from typing import Final

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.install.doctor.check import Check, fault, ok, run_all, warning
from gpulock.install.hooks import HookPaths
from gpulock.install.items import Wanted
from gpulock.install.slurm.configured_hooks import (
    EPILOG,
    PATHS,
    PROLOG,
    TASK,
    InForceHook,
    find_slurm_hook,
    misplaced_program,
)
from gpulock.install.slurm.plugstack import PLUGIN, find_plugstack, plugstack_fault
from gpulock.install.slurm.site import SlurmError, SlurmSite
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.install.slurm.spank import EVERYWHERE, SpankPlugin
from gpulock.install.slurm.texts import (
    HOOK_SECONDS,
    has_submit_script,
    opens_pam_sessions,
    slurm_setting_advice,
)
from gpulock.install.trial import rival_hook_reason, why_users_cannot_run
from gpulock.isolation import tree
from gpulock.node.settings import Settings
from gpulock.slurm.note import REQUEUE_EXIT
from gpulock.store.gate import LONGEST_WAIT

RECONFIGURE: Final = "then scontrol reconfigure"
_SHOW: Final = "gpulock install slurm --dry-run shows the lines for slurm.conf"
_MESSAGE_SECONDS: Final = 10  # MessageTimeout's default
_WITHOUT: Final = {
    PROLOG: "its jobs get no lock",
    TASK: "tasks get no mask, and a refused job runs",
    EPILOG: "no lock is given back",
}
# Of a node's State=; a * means that slurmctld gets no answer from slurmd.
_NO_JOBS: Final = ("DRAIN", "DOWN", "FAIL", "INVAL", "UNKNOWN", "NOT_RESPONDING", "*")


class SlurmConfChecks:
    """The configuration in force; each method yields the checks of one thing."""

    def __init__(
        self, settings: Settings, site: SlurmSite, conf: SlurmConf, paths: HookPaths
    ) -> None:
        self.settings = settings
        self.site = site
        self.conf = conf
        self.paths = paths
        self.by_cgroup = settings.isolation == "cgroup"
        self.wants = {want.key: want for want in slurm_setting_advice(conf, settings)}

    def checks(self) -> list[Check]:
        """Return all checks of the configuration."""
        return run_all(
            {
                PROLOG: lambda: self.hook(PROLOG),
                TASK: self.task,
                EPILOG: lambda: self.hook(EPILOG),
                "PrologFlags": self.flags,
                "RequeueExit": self.requeue,
                "PrologEpilogTimeout": self.timeouts,
                "MessageTimeout": self.message_timeout,
                "ProctrackType": self.tracking,
                "GresTypes": self.gres_types,
                "SelectType": self.selection,
                "JobSubmitPlugins": self.submission,
                "LaunchParameters": self.interactive,
                "SchedulerParameters": self.held,
                "UsePAM": self.sessions,
                "GetEnvTimeout": self.login_files,
                "node": self.node,
            }
        )

    def task(self) -> Iterator[Check]:
        """Look whether tasks are told by TaskProlog, or by the SPANK plugin in its place."""
        stack = find_plugstack(self.conf, self.site.conf)
        plugin = SpankPlugin(self.paths.folder.parent / PLUGIN, self.paths.slurm_task, self.site)
        if not stack.ours and stack.pyxis is None:
            yield from self.hook(TASK)
            return
        do = "gpulock install slurm --spank --dry-run shows the lines for plugstack.conf"
        if wrong := plugstack_fault(stack, plugin.path):
            if stack.pyxis and not stack.ours:
                wrong = f"{stack.pyxis.file}: pyxis starts TaskProlog inside its containers"
            yield fault(wrong, do)
            return
        if left := plugin.remainder(Wanted.PRESENT):
            yield fault(left.clause, f"{plugin.command()}, {EVERYWHERE}")
        elif why := why_untrusted_program(plugin.path, (0, os.geteuid())):
            yield fault(why, "let root alone change it: each task loads it")
        elif task := self.conf.get(TASK):
            do = "take it out of slurm.conf: the SPANK plugin runs gpulock's"
            pyxis = "inside containers of pyxis it fails" if stack.pyxis else "it runs as well"
            yield warning(f"{task}: {pyxis}", do)
        else:
            yield ok(f"none, by {plugin.path} ({plugin.read()})")

    def hook(self, key: str) -> Iterator[Check]:
        """Look whether one hook of ours is in force, can be run, and is in its place."""
        found = find_slurm_hook(self.conf, key, self.paths, self.site.conf)
        if not found.ours:
            what = f"not gpulock's ({found.text}): {_WITHOUT[key]}"
            if found.values and not found.programs:
                what = f"{found.text} names nothing on this node: Slurm drains it at the next job"
            yield fault(what, _SHOW)
            return
        ours = found.ours[0]
        if not os.access(ours, os.X_OK):
            yield fault(f"{ours} cannot be executed", f"chmod 755 {quote(str(ours))}")
        elif key == TASK and (why := why_users_cannot_run(ours)):
            yield fault(f"{why}: every task fails", "let all users read and execute it")
        elif wrong := misplaced_program(found):
            order = "before gpulock's Prolog" if key == PROLOG else "after gpulock's Epilog"
            do = f"give {ours} another name: Slurm goes in reverse alphabetical order"
            yield warning(f"{wrong} runs {order}: it may use GPUs that are not locked", do)
        else:
            yield from [*self.rivals(found)] or [ok(found.text)]

    def rivals(self, found: InForceHook) -> Iterator[Check]:
        """Warn of a hook of the site's that hands out GPUs itself."""
        target = PATHS[found.key](self.paths)
        for path in found.programs:
            if path in found.ours and path.resolve() == target.resolve():
                continue  # any other is a script of the site's that calls ours
            if why := rival_hook_reason(str(path)):
                what = f"does {path} hand out GPUs itself ({why})?"
                yield warning(what, "then take it out, or its part that does")

    def line(self, key: str) -> str:
        """Return what to do about a key that is to be otherwise."""
        return f"in slurm.conf: {key}={self.wants[key].value}; {RECONFIGURE}"

    def flags(self) -> Iterator[Check]:
        """Look at what makes a job's end provable, and at what slows the node down."""
        key = "PrologFlags"
        if key in self.wants:
            now = self.conf.get(key) or "none"
            what = f"{now}, without Contain: that a job without steps is over is never proven"
            yield fault(what, self.line(key))
        elif self.conf.has(key, "Serial"):
            what = "Serial: one hook at a time, jobs start and end slowly"
            yield warning(what, "take Serial out; gpulock does not need it")
        else:
            yield ok(self.conf.get(key))

    def requeue(self) -> Iterator[Check]:
        """Look whether slurmctld knows the exit code that means `again later`."""
        key = "RequeueExit"
        now = self.conf.get(key) or "none"
        if key in self.wants:
            what = f"{now}, without {REQUEUE_EXIT}: jobs that find no GPU free fail"
            yield fault(what, self.line(key))
        else:
            yield ok(now)

    def timeouts(self) -> Iterator[Check]:
        """Look whether Slurm leaves the hooks the time they may need."""
        enough = HOOK_SECONDS
        for key in self.conf.hook_timeouts():
            want = self.wants.get(key)
            if want and want.needed:
                what = f"{want.now} s: a hook may take {enough} s, and one that is killed drains"
                yield fault(f"{what} the node", self.line(key), key)
            elif want:
                yield warning("none: a hook that hangs blocks the node", self.line(key), key)
            else:
                yield ok(self.conf.get(key) or self.conf.get("PrologEpilogTimeout"), key)

    def message_timeout(self) -> Iterator[Check]:
        """Look whether srun waits as long as a Prolog does."""
        message = self.conf.seconds("MessageTimeout") or _MESSAGE_SECONDS
        wait = self.settings.slurm_wait + LONGEST_WAIT
        if not self.conf.has("PrologFlags", "Alloc", "Contain", "X11") and message < wait:
            what = f"{message} s: srun gives up while a Prolog waits up to {wait:.0f} s for GPUs"
            yield fault(what, "PrologFlags=Contain lets srun wait")

    def tracking(self) -> Iterator[Check]:
        """Warn where children of a job can outlive it."""
        found = self.conf.get("ProctrackType")
        if found in ("proctrack/linuxproc", "proctrack/pgid"):
            what = f"{found}: leftover processes of a job keep its GPUs locked"
            yield warning(what, "ProctrackType=proctrack/cgroup; needs all daemons restarted")
        else:
            yield ok(found or "the default")

    def gres_types(self) -> Iterator[Check]:
        """Look whether slurmctld knows of GPUs at all."""
        key, names = "GresTypes", self.settings.slurm_gres
        if not self.conf.has(key, *names):
            what = f"{key} is {self.conf.get(key) or 'none'}, without {' '.join(names)}"
            do = f"{key}={names[0]} in slurm.conf, and Gres= of the nodes; restart all daemons"
            yield fault(f"{what}: no job can ask for GPUs", do)

    def selection(self) -> Iterator[Check]:
        """Look which requests for GPUs slurmctld understands."""
        found = self.conf.get("SelectType") or "select/cons_tres"
        if found == "select/cons_tres":
            yield ok(found)
        else:
            do = "select/cons_tres knows both; needs slurmctld restarted"
            yield warning(f"{found}: only --gres works, not --gpus or --gpus-per-task", do)

    def submission(self) -> Iterator[Check]:
        """Look at what keeps a job from draining its node."""
        now = self.conf.get("JobSubmitPlugins") or "none"
        do = "gpulock install slurm --dry-run shows job_submit.lua"
        if has_submit_script(self.conf):
            yield ok(now)
        else:
            yield warning(f"{now}: any user drains a node by one large SPANK variable", do)

    def interactive(self) -> Iterator[Check]:
        """Warn of shells without a mask."""
        key = "LaunchParameters"
        if key in self.wants:
            what = "without use_interactive_step the shell of salloc gets no mask"
            yield warning(what, self.line(key))
        else:
            yield ok(self.conf.get(key))

    def sessions(self) -> Iterator[Check]:
        """Look whether step daemons open the sessions by which ISOLATION=cgroup confines them."""
        if not self.by_cgroup:
            return
        now = self.conf.get("UsePAM") or "not set"
        if opens_pam_sessions(self.conf):
            yield ok(now)
        else:
            do = f"UsePAM=1 in slurm.conf, {RECONFIGURE}; see docs/isolation.md"
            yield fault(f"{now}: no task starts under ISOLATION=cgroup", do)

    def login_files(self) -> Iterator[Check]:
        """Look whether slurmd runs login files where nothing closes its cgroup to users."""
        trees = tree.find_hierarchies(self.settings.sys_root) if self.by_cgroup else []
        if not trees or any(one.version == tree.V2 for one in trees):
            return  # nothing to close, or the Prolog closes slurmd's own cgroup
        key = "GetEnvTimeout"
        if self.conf.seconds(key) == 0:
            yield ok("0: slurmd runs no login file")
        else:
            what = "slurmd runs users' login files (sbatch --get-user-env), which open every GPU"
            yield warning(what, f"{key}=0 in slurm.conf, or mount cgroup version 2")

    def held(self) -> Iterator[Check]:
        """Warn of jobs that are held where they meet a broken node."""
        key = "SchedulerParameters"
        if key in self.wants:
            what = "jobs that meet a broken node are held (launch_failed_requeued_held)"
            yield warning(what, f"nohold_on_prolog_fail lets them go elsewhere: {self.line(key)}")
        else:
            yield ok("jobs that meet a broken node go elsewhere")

    def node(self) -> Iterator[Check]:
        """Say where Slurm gives this node no jobs."""
        if self.conf.source != "slurmctld":
            return
        for node in self.site.node_names():
            try:
                text = self.site.scontrol("show", "node", node)
            except SlurmError as reason:
                what = f"slurmctld does not know {node}: {reason}"
                yield warning(what, "is NodeName= another? start slurmd with -N NAME")
                continue
            state = (re.search(r"\bState=(\S+)", text) or ("", "UNKNOWN"))[1]
            why = (re.search(r"\bReason=(.*)", text) or ("", "no reason given"))[1].strip()
            if any(word in state for word in _NO_JOBS):
                do = f"once it is repaired: scontrol update nodename={node} state=resume"
                yield warning(f"{node} is {state}: {why}", do)
            else:
                yield ok(f"{node} is {state}")
