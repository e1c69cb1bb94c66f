# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge` and `uninstall sge` on an execution host.

What the whole cluster has comes before, once, by `--cluster`. A hook that is missing on a node puts
every job there into error, so the host joins the group of the hooks last, and leaves it first. The
epilog and all that a running job needs stay until no job holds a device. The hooks of both
schedulers are one folder, which goes with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

from gpulock.install import drop_env
from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.files import InstallError
from gpulock.install.items import ByHand, FileItem, Item, Remainder, Wanted
from gpulock.install.node_part import SHOW_MASK, NodePart
from gpulock.install.sge import login
from gpulock.install.sge.cards import CardMap, CardNames, is_rsmap, mapped_cards
from gpulock.install.sge.complexes import (
    Amounts,
    check_complexes,
    cluster_complexes,
    counting_complexes,
    host_amount,
)
from gpulock.install.sge.host import HostConfiguration, SgeHost
from gpulock.install.sge.qconf import Qconf
from gpulock.install.sge.queue_hooks import (
    GROUP,
    HOOKS,
    hooked_queues,
    queue_hooks,
    site_lines_left,
)
from gpulock.install.sge.site import (
    find_own_execd,
    find_qmaster,
    find_sge_shepherd,
    sge_host_name,
)
from gpulock.install.versions import (
    SGE,
    SLURM,
    Hooks,
    current_hooks,
    held_devices_item,
    installed_schedulers,
    is_to_uninstall,
)
from gpulock.sge.card_map import format_card_map

CLUSTER: Final = "gpulock install sge --cluster --queue QUEUE"


class SgeInstaller(NodePart):
    """Find out what is to be there on this node, or to go from it."""

    def __init__(
        self,
        config: Path,
        echo: Callable[[str], None],
        map_option: str = "",
    ) -> None:
        super().__init__(config, "sge")
        self.echo, self.map_option = echo, map_option
        self.complex = self.settings.sge_complexes[0]

    @cached_property
    def execd(self) -> SchedulerDaemon | None:
        """The execd of this cell; raises InstallError for several."""
        return find_own_execd(self.settings)

    @cached_property
    def qconf(self) -> Qconf:
        """What leads to qmaster; raises InstallError."""
        return find_qmaster(self.settings, self.execd)

    @cached_property
    def host(self) -> SgeHost:
        """This host; raises InstallError where it is none of the cell's."""
        current = current_hooks(self.settings).folder
        name = sge_host_name(self.qconf, self.execd)
        return SgeHost(self.qconf, name, current, self.execd, self.echo)

    @cached_property
    def lines(self) -> dict[str, str]:
        """The configuration of this host."""
        return self.host.effective_configuration()

    def parts(self) -> list[Item]:
        if not self.execd:
            raise InstallError("no execd runs here: start it, and run this again")
        host = self.host
        gpus = self.count_gpus()
        if not gpus:
            raise InstallError("the driver shows no GPU; look at the driver, or set EXPECTED_GPUS")
        settings = self.settings_item(self.execd, gpus)
        drop_env.drop_env_program()
        complexes = cluster_complexes(self.settings)
        table = host.qconf.complexes()
        check_complexes(table, complexes)
        files: list[Item] = [
            self.card_map(table),
            Hooks(self.settings, SGE),
            *self.login_scripts(self.execd),
        ]
        cluster = ByHand("the cluster's part", lambda: self.missing_in_cluster(complexes))
        hooks = queue_hooks(host, *HOOKS)
        for one in hooks:
            one.check()  # refused before anything is written
        counted = [n for n in counting_complexes(self.settings) if not is_rsmap(table.get(n, ""))]
        amounts = Amounts(host, {n: host_amount(self.settings, n, gpus) for n in counted})
        queue = [*hooked_queues(host), "QUEUE"][0]
        self.trial = f"qsub -q {queue}@{host.name} -l {self.complex}=1 -b y -j y {SHOW_MASK}"
        return [settings, *files, cluster, amounts, HostConfiguration(host), *hooks]

    def removal(self) -> list[Item]:
        """Return the items, of which the last goes first: the prologs.

        Those that Slurm needs as well are left to it. Raises InstallError.
        """
        if not is_to_uninstall(self.settings, SGE):
            return []
        host = self.host
        hooks = Hooks(self.settings, before_removal=lambda: host.await_configuration(sensor=False))
        shared: list[Item] = [hooks]
        if SLURM in installed_schedulers(self.settings):
            self.note("the hooks stay: Slurm uses them")
            shared = []
        mark = CardMap(self.settings.state_dir, "", host.name, host.qconf.run)
        epilogs, prologs = [queue_hooks(host, hook) for hook in HOOKS]
        scripts = login.login_script_items(login.PROFILE)
        jobs = held_devices_item(self.settings, SGE)
        leading = ByHand("lines of the site's that lead here", lambda: site_lines_left(host))
        own = HostConfiguration(host)
        if own.goal(Wanted.ABSENT) == own.idle_text():
            self.note(f"stays: qconf -dconf {host.name}")
        here = host.values("complex_values")
        for name in [name for name in self.settings.sge_complexes if name in here]:
            self.note(f"stays: qconf -dattr exechost complex_values {name} {host.name}")
        in_qmaster = [own, *epilogs, jobs, leading, *prologs]
        return [mark, *shared, *scripts, *in_qmaster]

    def missing_in_cluster(self, complexes: Collection[str]) -> Remainder | None:
        """Return what a manager has not installed: without it no job comes to the hooks."""
        host, table = self.host, self.qconf.complexes()
        missing = [name for name in complexes if name not in table]
        what = [f"there is no complex {' '.join(missing)}"] if missing else []
        if not hooked_queues(host):
            what.append(f"no queue of {host.name} has the hooks of {host.current} for {GROUP}")
        return Remainder("; ".join(what), [f"once, by a manager: {CLUSTER}"]) if what else None

    def settings_item(self, execd: SchedulerDaemon, gpus: int) -> FileItem:
        """Return the settings file, which names Grid Engine and the shepherd that ours becomes."""
        real = find_sge_shepherd(self.settings, self.qconf, execd, self.lines)
        keys = {"EXPECTED_GPUS": str(gpus), **self.qconf.keys(), "SGE_COMPLEXES": self.complex}
        return self.settings_file_item({**keys, "SGE_SHEPHERD": str(real)})

    def card_map(self, table: Mapping[str, str]) -> CardMap:
        """Return the map of an RSMAP's ids, by which gpulock is known to be here."""
        cards: CardNames = {}
        if is_rsmap(table.get(self.complex, "")):
            value = self.host.values("complex_values").get(self.complex, "")
            cards = mapped_cards(self.settings, self.complex, value, self.map_option)
        text = format_card_map(self.host.name, cards)
        return CardMap(self.settings.state_dir, text, self.host.name, self.host.qconf.run)

    def login_scripts(self, execd: SchedulerDaemon) -> list[Item]:
        """Return the login scripts for qlogin, which know execd's spool directory."""
        text = login.login_script_text(str(execd.folder), self.lines.get("gid_range", ""))
        return login.login_script_items(login.PROFILE, text)
