# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge` on an execution host: its files, its amounts, its hooks in force.

What the whole cluster has comes before, once, by `--cluster`. A hook that is missing on a node puts
every job there into error, so the host joins the group of the hooks last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.container_hooks import choose_container_hooks
from gpulock.install.files import InstallError
from gpulock.install.hooks import describe_drop_env
from gpulock.install.items import FileItem, InstallParts, Item, Remainder, SettingsFile, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.sge.cards import CardMap, CardNames, is_rsmap, mapped_cards
from gpulock.install.sge.cluster_items import GROUP
from gpulock.install.sge.host_hooks import HostHook
from gpulock.install.sge.host_items import (
    Amount,
    HostConfiguration,
    SgeHooks,
    SgeHost,
    read_amounts,
)
from gpulock.install.sge.host_report import HostReport
from gpulock.install.sge.kinds import (
    check_complexes,
    cluster_complexes,
    plain_amount,
    read_node_devices,
)
from gpulock.install.sge.login_shells import (
    csh_profile_paths,
    csh_profile_text,
    login_shell_faults,
)
from gpulock.install.sge.qconf import parse_host_overrides
from gpulock.install.sge.qmaster import (
    effective_host_conf,
    queues_of_host,
    read_complexes,
)
from gpulock.install.sge.site import (
    find_own_execd,
    find_sge_site,
    sge_host_name,
    tried_sge_shepherd,
)
from gpulock.install.sge.texts import HOOKS, login_script_text, parse_hook_line
from gpulock.install.versions import SGE, current_hooks
from gpulock.node.settings_file import DEFAULT_PATH
from gpulock.sge.card_map import format_card_map
from gpulock.sge.complexes import count_complex

PROFILE: Final = Path("/etc/profile.d/gpulock.sh")
CLUSTER: Final = "gpulock install sge --cluster --queue QUEUE"
Echo = Callable[[str], None]


@dataclass(frozen=True)
class SgeOptions:
    """What the administrator asks for."""

    config: Path = Path(DEFAULT_PATH)
    map: str = ""
    profile: Path = PROFILE
    enroot: bool = False
    podman: bool = False


class ClusterPart(Item):
    """What a manager has installed for all hosts: without it no job comes to the hooks."""

    title = "the cluster's part"

    def __init__(self, host: SgeHost, complexes: Collection[str]) -> None:
        self.host, self.complexes = host, complexes

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.ABSENT:
            return None
        table = read_complexes(self.host.qconf)
        missing = [name for name in self.complexes if name not in table]
        what = [f"there is no complex {' '.join(missing)}"] if missing else []
        lines = hooked_queues(self.host)
        if not lines:
            what.append(f"no queue of {self.host.name} has hooks for {GROUP}")
        elif wrong := [one for one in lines.items() if one[1] != self.host.current]:
            queue, current = wrong[0]
            what.append(f"{queue} leads to {current}, not to {self.host.current}")
        page = [f"once, by a manager: {CLUSTER}"]
        return Remainder("; ".join(what), page) if what else None


class SgeInstaller(NodePart):
    """Find out what is to be there on this node, step by step."""

    def __init__(self, options: SgeOptions, echo: Echo) -> None:
        super().__init__(options.config, "sge")
        self.options = options
        self.execd = find_own_execd(self.settings, self.given)
        self.site = find_sge_site(self.settings, self.given, self.execd)
        self.complex = self.settings.sge_complexes[0]
        qconf = self.site.qconf()
        name = sge_host_name(qconf)
        report = HostReport(qconf, name, self.execd, echo)
        self.host = SgeHost(qconf, name, current_hooks(self.settings).folder, report)
        self.lines = effective_host_conf(qconf, name)

    def parts(self) -> InstallParts:
        """Return all items; raise InstallError for what cannot be installed here."""
        options = self.options
        gpus = self.count_gpus()
        if not gpus:
            raise InstallError("the driver shows no GPU; look at the driver, or set EXPECTED_GPUS")
        settings = self.settings_item(gpus)
        self.note(describe_drop_env())
        complexes = cluster_complexes(self.settings)
        table = read_complexes(self.host.qconf)
        check_complexes(table, complexes)
        positions = self.card_map(table)
        hooks = SgeHooks(self.settings, SGE)
        containers = choose_container_hooks(options.enroot, options.podman)
        files = [positions, hooks, *containers, *self.login_scripts()]
        cluster = ClusterPart(self.host, complexes)
        self.note_other_queues()
        items = [*self.folders(), settings, *files, cluster]
        amounts = self.amounts(gpus, table, cluster)
        after = host_items(self.host, (cluster, hooks))
        parts = [*items, *amounts, *after]
        return InstallParts(parts, self.notes, try_line=self.try_line())

    def settings_item(self, gpus: int) -> SettingsFile:
        """Return the settings file, which names Grid Engine and the shepherd that ours becomes."""
        real = tried_sge_shepherd(self.settings, self.site, self.execd, self.lines)
        keys = {"EXPECTED_GPUS": str(gpus), **self.site.keys(), "SGE_COMPLEXES": self.complex}
        return self.settings_file_item({**keys, "SGE_SHEPHERD": str(real)})

    def card_map(self, table: Mapping[str, str]) -> CardMap:
        """Return the map of an RSMAP's ids, by which gpulock is known to be here."""
        cards: CardNames = {}
        if is_rsmap(table.get(self.complex, "")):
            value = read_amounts(self.host).get(self.complex, "")
            cards = mapped_cards(self.settings, self.complex, value, self.options.map)
        text = format_card_map(self.host.name, cards)
        return CardMap(self.settings.state_dir, text, self.host.name, self.host.qconf.run)

    def login_scripts(self) -> list[Item]:
        """Return the login scripts for qlogin, which know execd's spool directory."""
        profile, folder = self.options.profile, Path(self.lines["execd_spool_dir"], self.host.name)
        spool = self.execd.folder if self.execd else folder
        if not self.execd and not spool.is_dir():
            self.note(f"no execd runs here: {profile} for qlogin is left out")
            return []
        for what, do in login_shell_faults(profile):
            self.note(f"{what}; {do}")
        text = login_script_text(str(spool), self.lines.get("gid_range", ""))
        return login_script_items(profile, text)

    def amounts(self, gpus: int, table: Mapping[str, str], cluster: Item) -> list[Item]:
        """Return how many of each complex this host has; a number that stands there stays."""
        here, found = read_amounts(self.host), read_node_devices(self.settings)
        items: list[Item] = []
        counts = {self.complex: plain_amount(self.settings, self.complex, gpus)}
        for name, kind in self.settings.sge_kinds.items():
            if kind:
                counts[name] = count_complex(found, self.settings, name)
        for name, count in counts.items():
            now = here.get(name)
            if is_rsmap(table.get(name, "")):
                continue
            if now is None and count:
                items.append(Amount(self.host, name, count, (cluster,)))
            elif now is not None and now != str(count):
                element = f"{name}={count} {self.host.name}"
                self.note(f"{name}={now} stays: qconf -mattr exechost complex_values {element}")
        return items

    def note_other_queues(self) -> None:
        """Name the queues of this host whose jobs get no locks."""
        ours = hooked_queues(self.host)
        for queue in queues_of_host(self.host.qconf, self.host.name) if ours else ():
            if queue not in ours:
                self.note(
                    f"queue {queue} is on this host too, and its jobs get no locks: {CLUSTER}"
                )

    def try_line(self) -> str:
        """Return the job by which an ordinary user sees the mask."""
        queues = [*hooked_queues(self.host), "QUEUE"]
        job = f"-q {queues[0]}@{self.host.name} -l {self.complex}=1 -b y -j y"
        return f"qsub {job} /usr/bin/printenv CUDA_VISIBLE_DEVICES"


def login_script_items(profile: Path, text: str = "") -> list[Item]:
    """Return the login scripts of sh and csh."""
    csh = csh_profile_text(profile)
    scripts = {profile: text, **dict.fromkeys(csh_profile_paths(profile), csh)}
    return [FileItem(path, script) for path, script in scripts.items()]


def host_items(host: SgeHost, needs: tuple[Item, ...]) -> list[Item]:
    """Return what Grid Engine has of the host: the hooks of all queues come last, and go first."""
    conf = HostConfiguration(host, needs)
    queues = queues_of_host(host.qconf, host.name)
    hooks = [HostHook(host, queue, hook, (*needs, conf)) for hook in HOOKS for queue in queues]
    return [conf, *hooks]


def hooked_queues(host: SgeHost) -> dict[str, Path]:
    """Return where the hooks lead that a queue of this host has for the group, by queue."""
    found: dict[str, Path] = {}
    for queue in queues_of_host(host.qconf, host.name):
        shown = host.qconf.show("-sq", queue)
        lines = [parse_hook_line(parse_host_overrides(shown[h])[1].get(GROUP), h) for h in HOOKS]
        paths = {line.current if line else None for line in lines}
        if len(paths) == 1 and (path := paths.pop()):
            found[queue] = path
    return found
