# SPDX-License-Identifier: Apache-2.0
"""slurm.conf as an item: printed unless the administrator says --write-conf, then one block in it.

The file is the site's: no other line of it is touched, and nothing is ever put back. What slurmctld
goes by is read after one `scontrol reconfigure`, since a controller may read another file.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, discard_unrenamed, write_file
from gpulock.install.items import Item, Remainder, Wanted, difference_lines
from gpulock.install.slurm.conf_block import SplitConf, block_lines, split_slurm_conf
from gpulock.install.slurm.site import FETCHED_CONF, SlurmSite
from gpulock.install.slurm.slurm_conf import (
    SlurmConf,
    raw_slurm_lines,
    read_slurm_file,
    slurm_pairs,
)
from gpulock.install.slurm.spank import PlugStack
from gpulock.install.slurm.wanted import (
    EPILOG,
    INSTALL_FIRST,
    PATHS,
    TASK,
    InForceHook,
    WantedLine,
    find_slurm_hooks,
    slurm_conf_page,
    wanted_setting_lines,
)
from gpulock.install.versions import PLUGIN, current_hooks
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH

MOST_NAMED: Final = 5  # nodes, in a message
UNSURE: Final = "whether Slurm still starts the hooks cannot be found out"
RECONFIGURE: Final = "  scontrol reconfigure"
_LINES: Final = (
    "gpulock install slurm --dry-run prints the lines: put them into slurm.conf, or its template"
    " (Ansible, Puppet), then scontrol reconfigure once"
)
_MANAGERS: Final = re.compile(
    r"(?i)^\s*#.*(\b(ansible|puppet|chef|salt|cfengine|warewulf)\b|do not edit)"
)
_HEAD: Final = 20  # lines in which a manager of files names itself


@dataclass(frozen=True)
class SlurmOptions:
    """What the administrator asks for."""

    config: Path = Path(DEFAULT_PATH)
    write_conf: bool = False
    installed_everywhere: bool = False
    force: bool = False  # uninstall although jobs hold GPUs


class SlurmConfItem(Item):
    """The lines of slurm.conf by which Slurm starts the hooks."""

    def __init__(
        self, site: SlurmSite, settings: Settings, asked: SlurmOptions, by_spank: bool = False
    ) -> None:
        self.site, self.settings, self.asked, self.by_spank = site, settings, asked, by_spank
        self.paths = current_hooks(settings)
        self.title = str(site.conf or "slurm.conf")
        self.file = site.conf if site.conf and site.conf.is_file() else None
        self.path = self.file and self.file.resolve()  # of the cluster's own
        if self.file == FETCHED_CONF:
            self.path = None

    def show(self, wanted: Wanted) -> list[str]:
        if not self.asked.write_conf or (wanted is Wanted.ABSENT and not self.path):
            return []
        if not self.path:
            raise InstallError(
                f"slurm.conf of this node is {self.site.conf or 'not known'}, which is not the"
                " cluster's own: run it with --write-conf where slurmctld runs"
            )
        lines = difference_lines(_read(self.path), self._after(self.path, wanted))
        return lines or ([RECONFIGURE] if self._out_of_force(wanted) else [])

    def tidy(self) -> None:
        if self.asked.write_conf and self.path:
            discard_unrenamed(self.path)

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.ABSENT:
            return self._what_leads_here()
        lacks = [] if self.asked.write_conf else self.lacking(self.site.in_force())
        keys = [one.key if one.key in PATHS else f"{one.key}={one.value}" for one in lacks]
        what = f"slurm.conf lacks {', '.join(keys)}"
        return Remainder(what, slurm_conf_page(lacks), _LINES) if lacks else None

    def path_of(self, key: str) -> str:
        """Return where a hook of ours is."""
        return f"{self.paths.folder}/{PATHS[key]}"

    def hooks(self, conf: SlurmConf) -> list[InForceHook]:
        """Return the hooks that a configuration starts here."""
        return find_slurm_hooks(conf, self.paths, self.site.conf)

    def lacking(self, conf: SlurmConf) -> list[WantedLine]:
        """Return the lines that a configuration must hold, and does not."""
        hooks = [
            WantedLine(hook.key, self.path_of(hook.key), " ".join(hook.values))
            for hook in self.hooks(conf)
            if not hook.ours and not (self.by_spank and hook.key == TASK)
        ]
        return hooks + [one for one in wanted_setting_lines(conf, self.settings) if one.needed]

    def _after(self, path: Path, wanted: Wanted) -> str:
        """Return the file as it is to be; raise InstallError where a person has to decide."""
        split = split_slurm_conf(path, _read(path))
        if wanted is Wanted.ABSENT:
            # No Epilog goes while jobs hold GPUs, nor the extern step that proves one to be over.
            kept = (EPILOG, "PrologFlags") if self._busy_nodes() else ()
            lines = [line for line in split.lines or () if line.partition("=")[0] in kept]
            return split.with_lines(lines)
        lines = self._block(path, split)
        if lines != list(split.lines or ()):
            self._check_file(path, split.rest)
        return split.with_lines(lines)

    def _check_file(self, path: Path, text: str) -> None:
        """Raise InstallError for a file that another program writes, or of nodes without gpulock.

        Their next job would drain them.
        """
        for line in text.splitlines()[:_HEAD]:
            if _MANAGERS.search(line):
                raise InstallError(
                    f"{path} says `{line.strip()}`: put the lines that are printed without"
                    " --write-conf into its template; where no program writes the file take that"
                    " comment out"
                )
        others = self.site.split_nodes()[1]
        if others and not self.asked.installed_everywhere:
            raise InstallError(
                f"other nodes have this slurm.conf ({name_first(others)})."
                f" {' '.join(INSTALL_FIRST)} Then add --installed-everywhere"
            )

    def _block(self, path: Path, split: SplitConf) -> list[str]:
        """Return the lines of the block; raise InstallError for a key that stands elsewhere."""
        outside, block = list[tuple[Path, str, list[tuple[str, str]]]](), [*(split.lines or ())]
        for file, raw, bare in raw_slurm_lines(path):
            if file == path and raw in block:
                block.remove(raw)  # the same line once more is the site's
            else:
                outside.append((file, raw, slurm_pairs(bare)))
        values = {key.lower(): value for _, _, pairs in outside for key, value in pairs}
        wanted = self.lacking(SlurmConf(values))
        if site := next((line for line in wanted if line.is_beside_site), None):
            raise InstallError(
                f"the site's {site.key}={site.now} is to run beside gpulock's: join both by hand,"
                " as docs/slurm.md says"
            )
        for file, raw, pairs in outside:
            keys = {key.lower() for key, _ in pairs}
            if found := [line for line in wanted if line.key.lower() in keys]:
                lines = [f"    {line.key}={line.value}" for line in found]
                named = " ".join(line.key for line in found)
                raise InstallError(
                    f"{file} sets {named} already: change that by hand as shown above, and run it"
                    " again",
                    [f"in {file}:", "", f"    {raw.strip()}", "", "is to have:", "", *lines, ""],
                )
        return [f"{line.key}={line.value}" for line in wanted]

    def _block_lines(self) -> tuple[str, ...]:
        """Return the lines of the block that stands in this node's slurm.conf."""
        return (split_slurm_conf(self.file, _read(self.file)).lines if self.file else None) or ()

    def _busy_nodes(self) -> list[str]:
        """Return the nodes for which the Epilog stays; raise InstallError."""
        if self.asked.force:
            return []
        shown = self.site.scontrol("-d", "show", "node", "-o")
        return list_busy_nodes(shown)

    def _out_of_force(self, wanted: Wanted) -> bool:
        """Return whether slurmctld goes by less or by more than the file; raise InstallError."""
        conf = self.site.in_force()
        if wanted is Wanted.PRESENT:
            return bool(self.lacking(conf))
        written = self.site.in_file()
        own = [one.key for one in self.hooks(conf) if self.path_of(one.key) in one.values]
        return any(not written.get(key) for key in own)

    def write(self, wanted: Wanted) -> None:
        """Write, reconfigure once, and read what is in force; raise InstallError."""
        path = self.path
        assert path is not None
        after, had = self._after(path, wanted), path.stat()
        if after != _read(path):
            write_file(path, after, stat.S_IMODE(had.st_mode), (had.st_uid, had.st_gid))
        self.site.scontrol("reconfigure")
        if self._out_of_force(wanted):
            do = "make the same change there, then scontrol reconfigure; run it again"
            raise InstallError(f"slurmctld does not go by {path}: {do}")

    def _what_leads_here(self) -> Remainder | None:
        """Return what a person has to take out before the hooks may go."""
        if self.asked.write_conf and self._block_lines() and (nodes := self._busy_nodes()):
            return Remainder(f"Epilog stays while Slurm's jobs hold GPUs on {name_first(nodes)}")
        if self.asked.force:
            return None
        try:
            lines = [*dict.fromkeys(self._references())]
        except InstallError as fault:
            return Remainder(f"{UNSURE}: {fault}")
        do = "take out what is named above, everywhere, then scontrol reconfigure, and run it again"
        return Remainder(f"Slurm still starts the hooks; {do}", lines) if lines else None

    def _references(self) -> Iterator[str]:
        """Yield what starts a program of ours, in force or in the file; raise InstallError."""
        conf, plugin = self.site.in_force(), self.paths.folder.with_name(PLUGIN)
        for file, line in PlugStack(conf, self.site.conf).naming(str(plugin)):
            yield f"from {file}: {line}"
        block = self._block_lines()
        if not self.asked.write_conf:
            yield from (f"from {self.site.conf}: {line}" for line in block_lines(block))
        told = {line.partition("=")[0] for line in block}
        confs = {"slurmctld": conf}
        if self.file:
            confs[str(self.file)] = self.site.in_file()
        for source, one in confs.items():  # what the file says counts from the next reconfigure on
            for hook in self.hooks(one):
                if hook.ours and hook.key not in told:
                    told.add(hook.key)
                    line, target = f"{hook.key}={' '.join(hook.values)}", self.path_of(hook.key)
                    by = "".join(f" (by {link})" for link in hook.ours if str(link) != target)
                    yield f"from the slurm.conf of {source}: {line}{by}"


def _read(path: Path) -> str:
    return read_slurm_file(path).decode("utf-8", "surrogateescape")


def name_first(nodes: Sequence[str]) -> str:
    """Return the first nodes of a list, in a message; pure."""
    return " ".join([*nodes[:MOST_NAMED], *["..."][: len(nodes) > MOST_NAMED]])


def list_busy_nodes(shown: str) -> list[str]:
    """Return the nodes of `scontrol -d show node -o` with GPUs in use or jobs that end; pure."""
    used = re.compile(r"\bGresUsed=(?:\S*,)?(?:gpu|shard)(?::[^:\s,()]+)?:[1-9]")
    ends = re.compile(r"\bState=\S*COMPLETING")
    busy = [line for line in shown.splitlines() if used.search(line) or ends.search(line)]
    return [line.partition(" ")[0].partition("=")[2] for line in busy]
