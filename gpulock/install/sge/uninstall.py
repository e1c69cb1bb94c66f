# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall sge`: the items of this node, the prolog first, the hooks' files last.

The epilog and all that a running job needs stay until no job holds a device. The hooks of both
schedulers are one folder, which goes with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpulock.install.container_hooks import container_items
from gpulock.install.files import InstallError
from gpulock.install.items import InstallParts, Item, SettingsFile, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.sge.cards import CardMap
from gpulock.install.sge.host_hooks import SiteLines
from gpulock.install.sge.host_items import (
    HostConfiguration,
    SgeHooks,
    SgeHost,
    idle_configuration,
    read_amounts,
)
from gpulock.install.sge.host_report import HostReport
from gpulock.install.sge.install import PROFILE, host_items, login_script_items
from gpulock.install.sge.site import find_own_execd, find_sge_site, sge_host_name
from gpulock.install.versions import (
    SGE,
    SLURM,
    HeldDevices,
    current_hooks,
    hooks_folder,
    installed_schedulers,
    version_in_force,
)
from gpulock.sge.card_map import read_card_map


@dataclass(frozen=True)
class SgeRemoval:
    """What the administrator asks for."""

    config: Path
    profile: Path = PROFILE
    force: bool = False


class SgeRemover(NodePart):
    """Find out what of gpulock is here for Grid Engine."""

    def __init__(self, asked: SgeRemoval, echo: Callable[[str], None]) -> None:
        super().__init__(asked.config, "sge")
        self.asked, self.echo = asked, echo

    def parts(self) -> InstallParts:
        """Return the items; those that Slurm needs as well are left to it. Raises InstallError."""
        here = installed_schedulers(self.settings)
        lost_map = not here and version_in_force(hooks_folder(self.settings))
        if not (SGE in here or lost_map):
            return InstallParts([])
        hooks = SgeHooks(self.settings)
        host, is_master = self.host()
        hooks.report = host.report
        shared: list[Item] = [hooks, *container_items()]
        if SLURM in here:
            self.note("the hooks stay: Slurm uses them")
            shared = []
        mark = CardMap(self.settings.state_dir, "", host.name, host.qconf.run)
        settings = SettingsFile(self.config_path, "")
        files = [mark, *shared, *login_script_items(self.asked.profile)]
        in_qmaster = host_items(host, ())
        prologs = [item for item in in_qmaster if item.title.startswith("prolog ")]
        kept = [*files, *(item for item in in_qmaster if item not in prologs)]
        jobs = HeldDevices(self.settings, SGE, self.asked.force, tuple(kept))
        leading = SiteLines(host, is_master, tuple(kept))
        self.note_what_stays(host)
        return InstallParts([settings, *kept, jobs, leading, *prologs], self.notes)

    def host(self) -> tuple[SgeHost, bool]:
        """Return this host, and whether qmaster runs here; raise InstallError."""
        execd = find_own_execd(self.settings, self.given)
        site = find_sge_site(self.settings, self.given, execd)
        qconf = site.qconf()
        try:
            known = read_card_map(self.settings.state_dir)[0]
        except (OSError, ValueError) as fault:
            raise InstallError(f"sge-map: {fault}; run gpulock install sge again") from fault
        name = sge_host_name(qconf, known)
        report = HostReport(qconf, name, execd, self.echo)
        return SgeHost(qconf, name, current_hooks(self.settings).folder, report), site.is_master(
            name
        )

    def note_what_stays(self, host: SgeHost) -> None:
        """Say what stays of this host in qmaster, which the site may use."""
        own = HostConfiguration(host, ()).wanted(Wanted.ABSENT, host.configuration())
        if own == idle_configuration(host.shared()):
            self.note(f"stays: qconf -dconf {host.name}")
        here = read_amounts(host)
        for name in self.settings.sge_complexes:
            if name in here:
                self.note(f"stays: qconf -dattr exechost complex_values {name} {host.name}")
