# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Grid Engine beside the installer's items.

That is execd, what qmaster knows of this host, and what a site's configuration costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from gpulock.alloc.process_scan import ProcessScan
from gpulock.install.doctor.check import (
    DRIVER,
    INSTALLED,
    SETTINGS,
    Check,
    Finding,
    fact,
    fault,
    warning,
)
from gpulock.install.doctor.installation import check_installation, check_trial
from gpulock.install.files import InstallError
from gpulock.install.sge.complexes import host_amount
from gpulock.install.sge.install import CLUSTER, SgeInstaller
from gpulock.install.sge.queue_hooks import hooked_queues
from gpulock.install.sge.site import check_release
from gpulock.install.systemd.install import BOOTED
from gpulock.install.trial import try_sge_hooks
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.sge import shepherds

_AGAIN: Final = "gpulock install sge"
_PING: Final = "look whether sge_qmaster runs, and whether this host reaches it: qconf -sss"
_STATES: Final = 5  # the column of `qstat -f`
_BY_JOB: Final = re.compile(r"as result of job (\d+)'s failure")


class SgeChecks:
    """The checks of a node of Grid Engine; each method yields what is wrong with one thing."""

    def __init__(self, settings: Settings, config: Path) -> None:
        self.settings, self.config = settings, config

    def checks(self) -> list[Check]:
        """Return all checks, those of the node before those that ask qmaster."""
        trial = partial(check_trial, self.settings, try_sge_hooks)
        own = ("qmaster",)
        return [
            Check("execd", self.execd, (INSTALLED,)),
            Check("trial of hooks", trial, (INSTALLED,)),
            Check("qmaster", self.qmaster, (INSTALLED, "execd"), _PING),
            Check("Grid Engine", self.installation, (*own, SETTINGS)),
            Check("queues", self.other_queues, own),
            Check("queue", self.queue_states, own),
            Check("complex_values", self.amounts, (*own, DRIVER, "EXPECTED_GPUS")),
            Check("load sensor", self.sensor, (*own, "Grid Engine", "complex_values")),
            Check("execd_params", self.parameters, own),
        ]

    @cached_property
    def installer(self) -> SgeInstaller:
        """Return what knows the cell, this host and its items; raise InstallError."""
        return SgeInstaller(self.config, lambda _: None)

    def qmaster(self) -> Iterator[Finding]:
        """Look whether qmaster knows this host, and of which release it is."""
        _ = self.installer.host
        release = self.installer.qconf.release()
        yield fact(f"Grid Engine {release.removeprefix('SGE ')}")
        try:
            check_release(release)
        except InstallError as unknown:
            yield fault(str(unknown), "its jobs wait until gpulock is taken out")

    def installation(self) -> Iterator[Finding]:
        """Look what an installation would change."""
        return check_installation(self.installer.parts, _AGAIN)

    def execd(self) -> Iterator[Finding]:
        """Look whether execd can be seen, as the reaper must."""
        if self.installer.execd is None:
            yield fault("none runs here", "start it")
            return
        if hidden := shepherds.why_execd_hidden(ProcessScan(Proc(self.settings.proc_root))):
            yield fault(hidden, "run gpulock outside containers, as root with CAP_SYS_PTRACE")

    def other_queues(self) -> Iterator[Finding]:
        """Name the queues of this host without hooks of ours, where another has them."""
        ours = hooked_queues(self.installer.host)
        for queue in [one for one in self.installer.host.queues() if ours and one not in ours]:
            what = f"{queue} is on this host too, and its jobs get no lock"
            yield warning(what, CLUSTER.replace("QUEUE", queue))

    def queue_states(self) -> Iterator[Finding]:
        """Look for queues of this host in error; qstat fails where it has none."""
        host = self.installer.host
        if not host.queues():
            return
        shown = host.qconf.run("qstat", "-f", "-explain", "E", "-q", f"*@{host.name}")
        for queue in re.split(r"(?m)^(?=\S+@)", shown):
            words = queue.partition("\n")[0].split()
            if len(words) > _STATES and "E" in words[_STATES]:
                jobs = [*dict.fromkeys(_BY_JOB.findall(queue))]
                by = f" by job {', '.join(jobs)}" if jobs else ""
                why = f"gpulock why {jobs[-1]}; then " if jobs else ""
                yield fault(f"in error{by}", f"{why}qmod -cq {words[0]}", f"queue {words[0]}")

    def amounts(self) -> Iterator[Finding]:
        """Compare what qmaster may hand out on this host with what is there."""
        host, settings = self.installer.host, self.settings
        here = host.values("complex_values")
        values = {name: here[name] for name in settings.sge_complexes if name in here}
        for name, amount in values.items():
            there = host_amount(settings, name, settings.expected_gpus)
            do = f"qconf -mattr exechost complex_values {name}={there} {host.name}"
            if "(" in amount:
                continue  # ids: the map says which GPU each is
            if there and float(amount) > there:
                yield fault(f"{name}={amount}, but there are {there}: jobs are sent back", do)
            elif there and float(amount) < there:
                yield warning(f"{name}={amount} of {there} GPUs", do)

    def sensor(self) -> Iterator[Finding]:
        """Look whether the values of the load sensor arrive."""
        loads = self.installer.host.values("load_values")
        if "gpu.free" not in loads:
            do = "execd starts it within 2 load_report_times; then look at its messages file"
            yield warning("no values have arrived", do)

    def parameters(self) -> Iterator[Finding]:
        """Look at what changes how jobs start and end."""
        given = self.installer.lines.get("execd_params", "").upper().replace(",", " ").split()
        if "USE_CGROUPS=SYSTEMD" in given:
            what = "USE_CGROUPS=systemd: no process can be known as a job's: GPU jobs are refused"
            yield fault(what, "remove it from execd_params")
        scopes = BOOTED.is_dir() and self.installer.qconf.common("slice_name").is_file()
        scopes = scopes and not {"ENABLE_SYSTEMD=FALSE", "ENABLE_SYSTEMD=0"} & {*given}
        tagged = {"ENABLE_ADDGRP_KILL=TRUE", "ENABLE_ADDGRP_KILL=1"} & {*given}
        if scopes and (self.settings.isolation != "off" or not tagged):
            what = "execd moves jobs to scopes of systemd: GPU jobs are refused"
            do = "set ENABLE_SYSTEMD=false in execd_params; with ISOLATION=off"
            yield fault(what, f"{do} ENABLE_ADDGRP_KILL=true does, too")
        elif {"ENABLE_ADDGRP_KILL=FALSE", "ENABLE_ADDGRP_KILL=0"} & {*given}:
            what = "stray processes of a job keep running and keep its GPUs"
            yield warning(what, "remove ENABLE_ADDGRP_KILL=false from execd_params")
