# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge`: what changes on a node and in its cluster.

A hook that is missing on a node puts every job there into error, so the queue's prolog is set for
this host alone, once its hooks are in place; `all_hosts` sets it for the whole queue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from gpulock.install.change import Change, FilePlace, plan_place_change
from gpulock.install.hooks import InstallError, describe_drop_env
from gpulock.install.planner import InstallPlan, NodePlanner
from gpulock.install.sge import texts
from gpulock.install.sge.cards import is_rsmap, sge_map_text
from gpulock.install.sge.host_report import REPORTED, SENSOR, HostReport
from gpulock.install.sge.kinds import (
    CONSUMABLE,
    missing_kind_complexes,
    plain_amount,
    plan_kind_amounts,
)
from gpulock.install.sge.login_shells import (
    csh_profile_paths,
    csh_profile_text,
    login_shell_faults,
)
from gpulock.install.sge.places import (
    HostConfiguration,
    HostValue,
    QueueAttribute,
    check_queues,
    effective_host_conf,
    effective_sge_hook,
    plan_complexes,
    queue_instances,
    read_complexes,
)
from gpulock.install.sge.programs import OCS
from gpulock.install.sge.qconf import is_sge_none
from gpulock.install.sge.site import (
    find_own_execd,
    find_sge_site,
    sge_host_name,
    tried_sge_shepherd,
)
from gpulock.install.sge.terminals import (
    sge_admin_user,
    terminal_advice,
    terminal_advice_elsewhere,
)
from gpulock.install.sge.texts import SHEPHERD, complex_fault, login_script_text
from gpulock.install.trial import command_program, rival_hook_reason
from gpulock.install.trial_job import run_sge_trial
from gpulock.install.versions import CURRENT, DEFAULT_PREFIX, InstalledHooks
from gpulock.node.settings_file import DEFAULT_PATH
from gpulock.sge.card_map import NAME as SGE_MAP

VERIFIER: Final = "prolog/sge-jsv"
PROFILE: Final = Path("/etc/profile.d/gpulock.sh")
RESTART: Final = "restart execd, which then takes a new configuration; its jobs run on"
# gpu's fields behind name and shortcut: type relop requestable consumable default urgency
_LOAD_VALUE = "INT <= YES NO 0 0"


@dataclass(frozen=True)
class SgeOptions:
    """What the administrator asks for; what is None or empty is found out."""

    queues: tuple[str, ...]
    gpus: int | None = None
    complex: str = "gpu"
    map: str = ""
    host: str = ""
    all_hosts: bool = False
    prefix: Path = DEFAULT_PREFIX
    config: Path = Path(DEFAULT_PATH)
    interpreter: str = sys.executable
    sge_root: str = ""
    sge_cell: str = ""
    profile: Path = PROFILE
    enroot: bool = False
    podman: bool = False
    docker: bool = False
    quarantine_on: str | None = None
    accept_terminal_jobs: bool = False


def plan_sge(options: SgeOptions) -> InstallPlan:
    """Return what must change for a node's jobs to get GPUs; raise InstallError."""
    return SgePlanner(options).plan()


class SgePlanner(NodePlanner):
    """Find out what is there, step by step."""

    def __init__(self, options: SgeOptions) -> None:
        super().__init__(options.config, "sge")
        settings, given = self.settings, self.given
        self.options = options
        self.execd = find_own_execd(settings, given, options.sge_root, options.sge_cell)
        self.site = find_sge_site(settings, given, self.execd, options.sge_root, options.sge_cell)
        self.qconf = self.site.qconf()
        self.host = sge_host_name(self.qconf, options.host)
        self.current = options.prefix / CURRENT
        self.lines = effective_host_conf(self.qconf, self.host)
        self.instances = queue_instances(self.qconf)
        self.is_new = self.host not in self.qconf.names("-sconfl")

    def plan(self) -> InstallPlan:
        """Return the whole plan."""
        options = self.options
        check_queues(self.qconf, options.queues, self.host, self.instances)
        self.add_folders()
        gpus = self.count_gpus(options.gpus, needed=True)
        names = self.settings.sge_complexes
        if "SGE_COMPLEXES" in self.given and options.complex not in names:
            raise InstallError(
                f"{options.config}: SGE_COMPLEXES={' '.join(names)} lacks {options.complex}:"
                " its jobs would get no lock; add it"
            )
        keys = {"EXPECTED_GPUS": str(gpus), **self.site.keys(), "SGE_COMPLEXES": options.complex}
        real = tried_sge_shepherd(self.settings, self.site, self.execd, self.lines)
        self.check_terminal_jobs()
        keys |= {"SGE_SHEPHERD": str(real), **self.quarantine_keys(options.quarantine_on)}
        self.add_settings(keys | self.cdi_keys(options.docker))
        where = (options.prefix, options.config, options.interpreter)
        self.note(describe_drop_env())
        self.add_hooks(InstalledHooks(*where, Path(self.settings.lock_dir)))
        self.add_enroot(options.enroot)
        self.add_podman(options.podman, options.interpreter)
        self.add_docker(options.docker)
        self.add_profile()
        table = read_complexes(self.qconf)
        missing = self.missing_complexes(table) | missing_kind_complexes(table, self.settings)
        self.add(plan_complexes(self.qconf, missing))
        if is_rsmap(table.get(options.complex, "")):
            value = HostValue(self.qconf, self.host, options.complex).read() or ""
            text = sge_map_text(self.settings, self.host, options.complex, value, options.map)
            self.add_own(FilePlace(Path(self.settings.state_dir, SGE_MAP)), text)
        else:
            self.add(self.amount(plain_amount(self.settings, options.complex, gpus)))
        self.add(plan_kind_amounts(self.qconf, self.host, table, self.settings, self.note))
        shepherd = [*self.shepherd()]
        self.add(shepherd)
        self.add(self.sensor())
        self.plan_.own[HostConfiguration(self.qconf, self.host, "load_sensor").address] = None
        hooks = [  # no job may claim before there is an epilog
            change
            for hook in ("epilog", "prolog")
            for queue in options.queues
            for change in self.hook(queue, hook)
        ]
        if hooks:
            unsure = bool(shepherd) or not self.has_hooks()
            old = unsure and HostReport(self.qconf, self.host).has_sensor_values()
            hooks[0] = replace(hooks[0], first=partial(self.await_execd, old))
        self.add(hooks)
        self.note_verifier()
        self.note_others()
        instance = f"{options.queues[0]}@{self.host}"
        if self.execd and instance in self.instances:
            self.plan_.trial = partial(run_sge_trial, self.qconf, instance, options.complex)
        return self.plan_

    def note_verifier(self) -> None:
        """Say how qmaster gets the verifier, which is a line of the global configuration."""
        found = (self.qconf.configuration("global") or {}).get("jsv_url")
        if self.site.is_master(self.host) and is_sge_none(found):
            wanted = f"script:{self.current}/{VERIFIER}"
            self.note(f"qconf -mconf: jsv_url {wanted} has qmaster refuse invalid requests")

    def add_profile(self) -> None:
        """Install the login scripts for qlogin, which know execd's spool directory."""
        spool = self.execd.folder if self.execd else Path(self.lines["execd_spool_dir"], self.host)
        if not self.execd and not spool.is_dir():
            self.note(f"no execd runs here: {self.options.profile} for qlogin is left out")
            return
        text = login_script_text(str(spool), self.lines.get("gid_range", ""))
        self.add_own(FilePlace(self.options.profile), text)
        for path in csh_profile_paths(self.options.profile):
            self.add_own(FilePlace(path), csh_profile_text(self.options.profile))
        for what, do in login_shell_faults(self.options.profile):
            self.note(f"{what}; {do}")

    def missing_complexes(self, table: Mapping[str, str]) -> dict[str, str]:
        """Return the lines that are missing; the one for GPUs is a consumable without default."""
        name = self.options.complex
        if name in table and (fault := complex_fault(table[name])):
            raise InstallError(f"complex {name}: {fault}; correct it by qconf -mc")
        lines = {name: f"{name} {name} {CONSUMABLE}"}
        lines |= {reported: f"{reported} {reported} {_LOAD_VALUE}" for reported in REPORTED}
        return {key: line for key, line in lines.items() if key not in table}

    def amount(self, gpus: int) -> Iterable[Change]:
        """Tell qmaster how many GPUs this host has."""
        place = HostValue(self.qconf, self.host, self.options.complex)
        now = place.read()
        if now is not None and now != str(gpus) and self.options.gpus is None:
            self.note(f"{place.title} stays {now}, though it has {gpus} GPUs; --gpus sets it")
            return ()
        return plan_place_change(place, str(gpus))

    def sensor(self) -> Iterable[Change]:
        """Add the load sensor to those that run on this host already."""
        wanted = f"{self.current}/{SENSOR}"
        found = self.lines.get("load_sensor", "none")
        others = [] if is_sge_none(found) else [word.strip() for word in found.split(",")]
        if wanted in others:
            return ()
        others = [word for word in others if not word.endswith(f"/{SENSOR}")]
        return plan_place_change(
            HostConfiguration(self.qconf, self.host, "load_sensor"), ",".join([*others, wanted])
        )

    def shepherd(self) -> Iterable[Change]:
        """Have every job's config looked at before its shepherd reads it."""
        found = self.lines.get("shepherd_cmd", "none")
        if not is_sge_none(found) and not found.endswith(f"/{SHEPHERD}"):
            self.note(
                f"shepherd_cmd stays {found}, so a job's text can name a prolog of its own: set"
                f" SGE_SHEPHERD={found}, then shepherd_cmd none, and run this again"
            )
            return ()
        place = HostConfiguration(self.qconf, self.host, "shepherd_cmd")
        return plan_place_change(place, f"{self.current}/{SHEPHERD}")

    def check_terminal_jobs(self) -> None:
        """Raise InstallError where any user's job on a terminal would put a queue in error."""
        found = self.lines.get("shepherd_cmd", "none")
        command = SHEPHERD if is_sge_none(found) else found
        user, release = sge_admin_user(self.site), self.site.release()
        own = terminal_advice(release, user, f"/{command}")
        others = self.other_hosts(self.options.queues) if self.options.all_hosts else ()
        elsewhere = terminal_advice_elsewhere(self.qconf, release, user, others)
        advice = [one for one in (own, elsewhere) if one]
        if advice and not self.options.accept_terminal_jobs:
            said = [text for one in advice for text in one]
            raise InstallError("; ".join([*said, "--accept-terminal-jobs installs as it is"]))
        for one in advice:
            self.note(": ".join(one))
        if not own and terminal_advice(release, user, "none") and not release.startswith(OCS):
            self.note(
                f"admin_user is {user}: qlogin, and qrsh without -pty no, are refused with the"
                " reason; to have them, set admin_user none in bootstrap and restart the daemons"
            )

    def other_hosts(self, queues: Collection[str]) -> list[str]:
        """Return the other hosts that some queues have."""
        pairs = [instance.split("@") for instance in self.instances]
        return sorted({host for name, host in pairs if name in queues and host != self.host})

    def has_hooks(self) -> bool:
        """Return whether a hook of ours is in force on this host, set once execd was ready."""
        queues = [one.partition("@")[0] for one in self.instances if one.endswith(f"@{self.host}")]
        return any(
            texts.is_gpulock_command(
                effective_sge_hook(self.qconf, queue, self.host, hook, self.lines), hook
            )
            for queue in queues
            for hook in texts.HOOKS
        )

    def await_execd(self, old_sensor: bool, echo: Callable[[str], None]) -> None:
        """Wait until execd starts jobs by our shepherd_cmd, which the hooks need.

        The sensor is configured after it, and reports by then. An old one, which reported already,
        proves nothing: two later reports do. Raises InstallError.
        """
        if self.execd is None:
            return
        report = HostReport(self.qconf, self.host)

        def begun() -> None:
            echo(f"waiting for execd of {self.host} to take its configuration")
            if self.is_new:
                echo(f"the host had none of its own: {RESTART}")

        if old_sensor:
            done, what = report.wait_new_reports(begun), "sends no new report"
        else:
            done, what = report.wait_sensor(True, begun), "starts no load sensor"
        if not done:
            raise InstallError(
                f"execd of {self.host} {what} after {report.delay_seconds():.0f} s,"
                f" so no queue was changed: {RESTART}, or see {self.execd.folder}/messages, then"
                " run it again"
            )

    def hook(self, queue: str, hook: str) -> Iterable[Change]:
        """Set a queue's prolog or epilog, with the one in force behind it."""
        now = effective_sge_hook(self.qconf, queue, self.host, hook, self.lines)
        site = texts.site_command_of(now, hook)
        if self.options.all_hosts:
            self.check_all_hosts(queue, hook, site)
        if site is not None:
            self.note_site(queue, hook, site)
        wanted = texts.queue_hook_command(self.current, hook, site)
        domain = queue if self.options.all_hosts else f"{queue}@{self.host}"
        place = QueueAttribute(self.qconf, domain, hook)
        return () if now == wanted else plan_place_change(place, wanted)

    def check_all_hosts(self, queue: str, hook: str, site: str | None) -> None:
        """Raise InstallError where one line would replace different hooks on different hosts."""
        for host in self.other_hosts([queue]):
            theirs = texts.site_command_of(effective_sge_hook(self.qconf, queue, host, hook), hook)
            if theirs != site:
                raise InstallError(
                    f"the {hook} of {queue} is {site or 'none'} on {self.host} and"
                    f" {theirs or 'none'} on {host}; install host by host, without --all-hosts"
                )

    def note_site(self, queue: str, hook: str, site: str) -> None:
        """Say that the site's hook goes on running, and what is odd about it."""
        self.note(f"{queue}: the {hook} in force keeps running, with gpulock's: {site}")
        program = command_program(site)
        if program.is_absolute() and not program.exists():
            self.note(f"{queue}: {program} does not exist here: jobs would fail as they do now")
        if why := rival_hook_reason(site):
            self.note(f"{queue}: does this {hook} hand out GPUs itself ({why})? Then take it out")

    def note_others(self) -> None:
        """Warn of what lets jobs past the hooks, or breaks them."""
        for instance in self.instances:
            queue, _, host = instance.partition("@")
            if host != self.host or queue in self.options.queues:
                continue
            line = effective_sge_hook(self.qconf, queue, host, "prolog", self.lines)
            if not texts.is_gpulock_command(line, "prolog"):
                self.note(f"queue {queue} is on this host too, and its jobs get no locks: --queue?")
