# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Grid Engine: hooks, execd, and what qmaster knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.doctor.check import Check, fault, ok, run_all, warning
from gpulock.install.doctor.execd_params import check_execd_params, moves_jobs_to_scopes
from gpulock.install.doctor.hooks import InstalledHookChecks
from gpulock.install.doctor.login_shells import check_login_shells
from gpulock.install.doctor.node import others_may_link_in
from gpulock.install.doctor.process_room import check_process_room
from gpulock.install.doctor.sge_programs import (
    check_execd,
    check_execd_job_files,
    check_launcher,
    check_sge_release,
)
from gpulock.install.doctor.terminals import sge_admin_user, terminal_advice
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.installed import is_sge_installed
from gpulock.install.node_part import current_settings
from gpulock.install.sge import texts
from gpulock.install.sge.cards import card_map_fault
from gpulock.install.sge.host_report import SENSOR, parse_clock_seconds
from gpulock.install.sge.install import CLUSTER
from gpulock.install.sge.kinds import plain_amount, sensor_difference
from gpulock.install.sge.programs import minimum_id_fault
from gpulock.install.sge.qconf import is_sge_none, parse_complexes, parse_sge_list
from gpulock.install.sge.qmaster import (
    effective_host_conf,
    effective_sge_hook,
    queue_instances,
)
from gpulock.install.sge.site import find_execd, find_execds, find_sge_site, sge_host_name
from gpulock.install.sge.texts import (
    SHEPHERD,
    complex_fault,
)
from gpulock.install.trial import self_test_sge_hooks
from gpulock.install.versions import CURRENT
from gpulock.node.settings import Settings

_AGAIN: Final = "run gpulock install sge again"
_NONE: Final = "then shepherd_cmd none, and run gpulock install sge again"
# Options of qalter whose text is no line of a shepherd's config (docs/facts/grid-engine.md).
_HARMLESS: Final = frozenset(
    ("none", "ac", "dc", "sc", "h", "hold_jid", "j", "js", "m", "p", "R", "w")
)


def _try_hooks(paths: HookPaths, _: str) -> None:
    self_test_sge_hooks(paths)


HOOKS: Final = InstalledHookChecks(
    "sge", lambda paths: paths.prolog, "every job fails", _try_hooks, "tried"
)


def sge_checks(settings: Settings, config: Path, prefix: Path, profile: Path) -> list[Check]:
    """Return the checks of a node of Grid Engine; none where there is no Grid Engine."""
    execds = find_execds()
    _, given = current_settings(config)
    if not is_sge_installed(settings, prefix):
        what = "sge_execd runs here, but gpulock is not installed for it: its jobs get no lock"
        do = f"once, by a manager: {CLUSTER}; then, on each node: gpulock install sge"
        return [warning(what, do, "Grid Engine")] if execds else []
    cell = settings.sge_cell if "SGE_CELL" in given else ""
    execd = find_execd(execds, settings.sge_root, cell)
    checks = run_all(
        {
            "hooks": lambda: HOOKS.check(settings, config, prefix),
            "execd": lambda: check_execd(settings, execd),
            "Grid Engine": lambda: check_sge_release(settings, execd),
            "job files": lambda: check_execd_job_files(execd),
        }
    )
    try:
        cluster = SgeClusterChecks(settings, given, execd, prefix, profile)
    except (OSError, InstallError) as reason:
        what = f"could not be asked: {reason}; queues, complexes and sensor were not looked at"
        return [*checks, warning(what, "run it again when qmaster answers", "qmaster")]
    return [*checks, *cluster.checks()]


class SgeClusterChecks:
    """What qmaster knows of this host; each method yields the checks of one thing."""

    def __init__(
        self,
        settings: Settings,
        given: frozenset[str],
        execd: SchedulerDaemon | None,
        prefix: Path,
        profile: Path,
    ) -> None:
        self.settings = settings
        self.execd = execd
        self.current = prefix / CURRENT
        self.profile_path = profile
        self.site = find_sge_site(settings, given, execd)
        self.qconf = self.site.qconf()
        self.instances = queue_instances(self.qconf)
        self.host = sge_host_name(self.qconf)
        self.lines = effective_host_conf(self.qconf, self.host)
        self.exechost = self.qconf.show("-se", self.host)
        self.queues = [i.partition("@")[0] for i in self.instances if i.endswith(f"@{self.host}")]

    @cached_property
    def release(self) -> str:
        """Return the release of Grid Engine's clients; raise InstallError."""
        return self.site.release()

    def checks(self) -> list[Check]:
        """Return all checks of the cluster's configuration."""
        return run_all(
            {
                "queues": self.queue_hooks,
                "queue states": self.queue_states,
                "tmpdir": self.temporary_folders,
                "complexes": self.complexes,
                "complex_values": self.amounts,
                "load sensor": self.sensor,
                "interactive jobs": self.terminals,
                "shepherd_cmd": self.shepherd,
                "execd_params": self.parameters,
                "profile": self.profile,
                "jsv": self.verifier,
            }
        )

    def queue_hooks(self) -> Iterator[Check]:
        """Look at prolog and epilog in force for each queue of this host, and elsewhere."""
        ours = 0
        for queue in self.queues:
            name, do = f"queue {queue}", f"{CLUSTER.replace('QUEUE', queue)}, {_AGAIN}"
            lines = {
                hook: effective_sge_hook(self.qconf, queue, self.host, hook, self.lines)
                for hook in texts.HOOKS
            }
            if not any(self.is_gpulock_hook(line, hook) for hook, line in lines.items()):
                what = "neither prolog nor epilog is gpulock's: its jobs get no lock and no mask"
                yield warning(what, do, name)
                continue
            ours += 1
            bad = [f for hook, line in lines.items() if (f := self.line_fault(hook, line))]
            for what in bad:
                yield fault(what, do, name)
            if not bad:
                yield ok("prolog and epilog are gpulock's", name)
            yield from self.elsewhere(queue)
        if not ours:
            do = f"once, by a manager: {CLUSTER}; then {_AGAIN}"
            yield fault(f"no queue of host {self.host} has the hooks of gpulock", do, "queues")

    def is_gpulock_hook(self, line: str | None, hook: str) -> bool:
        """Say whether a line starts a hook of ours, rightly or not."""
        return texts.is_gpulock_command(line, hook) or any(
            word.endswith(f"/{hook}/sge") for word in (line or "").split()
        )

    def line_fault(self, hook: str, line: str | None) -> str:
        """Return what is wrong with the command line in force, or nothing."""
        if not self.is_gpulock_hook(line, hook):
            return f"its {hook} is {line or 'none'}, not gpulock's"
        ours = texts.parse_hook_line(line, hook)
        if ours and ours.current == self.current:
            return ""
        assert line is not None
        if not line.startswith("root@"):
            return f"its {hook} does not run as root: root@ is missing"
        if "/prolog/drop-env " not in line:
            return f"its {hook} is loaded with the job's environment: prolog/drop-env is missing"
        return f"its {hook} is not as installed: {line}"

    def elsewhere(self, queue: str) -> Iterator[Check]:
        """Look at the other hosts of a queue: which have no hooks of ours."""
        pairs = [instance.split("@") for instance in self.instances]
        hosts = sorted({host for name, host in pairs if name == queue and host != self.host})
        bare = [
            host
            for host in hosts
            if not all(
                texts.is_gpulock_command(effective_sge_hook(self.qconf, queue, host, hook), hook)
                for hook in texts.HOOKS
            )
        ]
        if bare:
            what = f"not the hooks of gpulock on {' '.join(bare)}"
            yield warning(what, "install there as well", f"queue {queue}")

    def queue_states(self) -> Iterator[Check]:
        """Look for queues of this host that are in error; qstat fails where it has none."""
        if not self.queues:
            return
        for line in self.qconf.run("qstat", "-f", "-q", f"*@{self.host}").splitlines():
            words = line.split()
            if words and "@" in words[0] and len(words) > 5 and "E" in words[5]:  # noqa: PLR2004
                do = f"qstat -f -explain E says why; then qmod -cq {words[0]}"
                yield fault(f"{words[0]} is in error: it takes no job", do)

    def temporary_folders(self) -> Iterator[Check]:
        """Look where execd makes each job's TMPDIR and gives it away, also through a link."""
        for queue in self.queues:
            path = self.qconf.show("-sq", f"{queue}@{self.host}").get("tmpdir", "/tmp")
            if others_may_link_in(path, self.settings.proc_root):
                what = f"others may write {path}, and execd follows their links there as root"
                do = "sysctl fs.protected_symlinks=1, or a tmpdir that root alone writes"
                yield warning(what, do, f"tmpdir of {queue}")

    def complexes(self) -> Iterator[Check]:
        """Look at the complexes that stand for GPUs."""
        found = parse_complexes(self.qconf.run("qconf", "-sc"))
        for one in self.settings.sge_complexes:
            name = f"complex {one}"
            if one not in found:
                do = f"{CLUSTER} --complex {one}, or correct SGE_COMPLEXES"
                yield fault("it does not exist", do, name)
            elif why := complex_fault(found[one]):
                yield fault(why, "correct it: qconf -mc", name)
            else:
                yield ok(found[one], name)

    def amounts(self) -> Iterator[Check]:
        """Compare what qmaster may hand out on this host with what is there."""
        values = parse_sge_list(self.exechost["complex_values"])
        for queue in self.queues:
            shown = self.qconf.show("-sq", f"{queue}@{self.host}").get("complex_values", "")
            values = parse_sge_list(shown) | values
        found = {key: values[key] for key in self.settings.sge_complexes if key in values}
        set_it = f"qconf -mattr exechost complex_values {{}}={{}} {self.host}".format
        if not found:
            names = " ".join(self.settings.sge_complexes)
            what = f"host {self.host} has no {names}: no GPU job starts here"
            yield fault(what, set_it("COMPLEX", "N"))
        for key, amount in found.items():
            there = plain_amount(self.settings, key, self.settings.expected_gpus)
            if "(" in amount:
                why = card_map_fault(self.settings.state_dir, self.host, key, amount)
                again = "run gpulock install sge --map again"
                yield fault(f"{key}: {why}", again) if why else ok(f"{key}={amount}")
            elif there and float(amount) > there:
                what = f"{key}={amount}, but there are {there}: jobs are sent back"
                yield fault(what, set_it(key, there))
            elif there and float(amount) < there:
                yield warning(f"{key}={amount} of {there} GPUs", set_it(key, there))
            else:
                yield ok(f"{key}={amount}")
        kinds = self.settings.sge_kinds
        for key in kinds:
            if kinds[key] and key not in found and (there := plain_amount(self.settings, key, 0)):
                what = f"this host has {there} of {kinds[key]}, but no {key}: no job gets them"
                yield warning(what, _AGAIN)
        same = [key for key in found if not kinds.get(key)]
        if len(same) > 1:
            what = f"{' and '.join(same)} stand for the same GPUs, qmaster counts each alone"
            meet = fault(f"{what}: jobs meet on one card, and wait", "use one of them")
            even = warning(what, "the load sensor evens it out; better to use one")
            yield meet if any("(" in amount for amount in found.values()) else even

    def sensor(self) -> Iterator[Check]:
        """Look whether the load sensor is configured and its values arrive."""
        set_now = self.lines.get("load_sensor", "none")
        if f"{self.current}/{SENSOR}" not in [word.strip() for word in set_now.split(",")]:
            what = f"not gpulock's: {set_now}; jobs go where no GPU is free, and come back"
            yield fault(what, _AGAIN)
        elif "gpu.free" not in (loads := parse_sge_list(self.exechost["load_values"])):
            do = "execd starts it within 2 load_report_times; then look at its messages file"
            yield warning("configured, but no values have arrived", do)
        elif what := sensor_difference(self.settings, loads):
            do = "wait a load_report_time; then end prolog/sge-sensor, which execd starts again"
            yield warning(what, do)
        else:
            yield ok("its values arrive")
        seconds = 2 * parse_clock_seconds(self.lines.get("load_report_time", ""))
        yield ok(f"a job sent back starts here again after about {seconds} s", "retry")

    def terminals(self) -> Iterator[Check]:
        """Look whether a user's job on a terminal stops the queue (facts/grid-engine.md)."""
        user = sge_admin_user(self.site)
        if user == "unknown":
            yield warning("bootstrap cannot be read: admin_user is not known")
        elif advice := terminal_advice(self.release, user, self.lines.get("shepherd_cmd", "none")):
            yield fault(*advice)
        else:
            yield ok(f"admin_user is {user}")

    def shepherd(self) -> Iterator[Check]:
        """Look at shepherd_cmd: it refuses forged jobs, and alone reaches slave tasks."""
        found = self.lines.get("shepherd_cmd", "none")
        if not found.startswith(f"{self.current}/"):
            what = f"it is {found}: a newline in a job's own text can run any program as root"
            if self.settings.isolation == "cgroup":
                what += "; parallel jobs are refused (ISOLATION=cgroup)"
            elif self.settings.sge_slave_tasks:
                what += "; slave tasks get no GPU (SGE_SLAVE_TASKS=yes)"
            yield fault(
                what, _AGAIN if is_sge_none(found) else f"set SGE_SHEPHERD={found}, {_NONE}"
            )
            return
        yield from check_launcher(Path(found.split()[0]), self.site.root, self.execd)

    def parameters(self) -> Iterator[Check]:
        """Look at what changes how jobs start and end."""
        common = Path(self.site.root, self.site.cell, "common")
        if why := minimum_id_fault(self.release, self.lines):
            yield fault(f"{why}: queues go into error", "set both to 0 (qconf -mconf)")
        scopes = moves_jobs_to_scopes(common)
        yield from check_execd_params(self.lines, self.settings.isolation, scopes)
        if self.execd is not None:
            yield from check_process_room(self.lines, self.settings, self.execd.pid)

    def profile(self) -> Iterator[Check]:
        """Look at the login scripts for qlogin."""
        return check_login_shells(self.profile_path, self.execd, self.lines.get("gid_range", ""))

    def verifier(self) -> Iterator[Check]:
        """Look whether invalid requests are turned away at submission."""
        lines = self.qconf.configuration("global") or {}
        found = lines.get("jsv_url", "none")
        unseen = {*parse_sge_list(lines.get("jsv_allowed_mod", "ac,h,i,e,o,j,M,N,p,w"))} - _HARMLESS
        if "/sge-jsv" in found and unseen and SHEPHERD not in self.lines.get("shepherd_cmd", ""):
            what = f"{found} does not see what qalter changes: -{' -'.join(sorted(unseen))}"
            yield fault(what, "set shepherd_cmd, or take them from jsv_allowed_mod")
        elif "/sge-jsv" in found:
            yield ok(found)
        else:
            what = "it is not gpulock's: -l gpu=1.5 is accepted, and its job ends in error"
            do = f"qconf -mconf: jsv_url script:{self.current}/prolog/sge-jsv"
            yield warning(what, do)
