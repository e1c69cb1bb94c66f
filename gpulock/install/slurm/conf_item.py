# SPDX-License-Identifier: Apache-2.0
"""slurm.conf as an item: printed unless the administrator says --write-conf, then one block in it.

The file is the site's: no other line of it is touched, and nothing is ever put back. What slurmctld
goes by is read after one `scontrol reconfigure`, since a controller may read another file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, discard_unrenamed, read_file, write_file
from gpulock.install.hooks import HookPaths
from gpulock.install.items import Item, Remainder, Scope, Wanted, difference_lines
from gpulock.install.slurm.conf_block import SplitConf, check_block, split_slurm_conf
from gpulock.install.slurm.configured_hooks import EPILOG, PATHS, TASK, find_slurm_hooks
from gpulock.install.slurm.removal import slurm_hook_references
from gpulock.install.slurm.site import FETCHED_CONF, SlurmSite, list_other_nodes
from gpulock.install.slurm.slurm_conf import (
    SlurmConf,
    raw_slurm_lines,
    slurm_pairs,
)
from gpulock.install.slurm.texts import INSTALL_FIRST, slurm_setting_advice
from gpulock.node.settings import Settings
from gpulock.text.words import format_count

MOST_NAMED: Final = 5  # nodes, in a message
UNSURE: Final = "whether Slurm still starts the hooks cannot be found out"
RECONFIGURE: Final = "  scontrol reconfigure"
_MANAGERS: Final = re.compile(
    r"(?i)^\s*#.*(\b(ansible|puppet|chef|salt|cfengine|warewulf)\b|do not edit)"
)
_HEAD: Final = 20  # lines in which a manager of files names itself


def wanted_slurm_keys(
    conf: SlurmConf, paths: HookPaths, settings: Settings, spank: bool, slurm_conf: Path | None
) -> dict[str, str]:
    """Return what a configuration must hold and does not; a site's own hook has the value ``."""
    wanted: dict[str, str] = {}
    for hook in find_slurm_hooks(conf, paths, slurm_conf):
        if not (hook.ours or (spank and hook.key == TASK)):
            wanted[hook.key] = "" if hook.values else str(PATHS[hook.key](paths))
    return wanted | {w.key: w.value for w in slurm_setting_advice(conf, settings) if w.needed}


@dataclass(frozen=True)
class ConfRequest:
    """What the administrator says of slurm.conf, and what the lines in it are made from."""

    paths: HookPaths
    spank: bool = False
    write: bool = False
    installed_everywhere: bool = False
    force: bool = False  # take all out while jobs hold GPUs


class SlurmConfItem(Item):
    """The lines of slurm.conf by which Slurm starts the hooks."""

    scope = Scope.CLUSTER

    def __init__(
        self, site: SlurmSite, settings: Settings, request: ConfRequest, needs: tuple[Item, ...]
    ) -> None:
        self.site, self.settings, self.request, self.needs = site, settings, request, needs
        self.title = str(site.conf or "slurm.conf")

    def show(self, wanted: Wanted) -> list[str]:
        if not self.request.write:
            return []
        path = self._path(wanted)
        if path is None:
            return []
        split = split_slurm_conf(path, self._text(path))
        after = self._after(path, split, wanted)
        lines = difference_lines(self._text(path), after)
        return lines or ([RECONFIGURE] if self._out_of_force(wanted, after) else [])

    def tidy(self) -> None:
        if self.request.write and self.site.conf and self.site.conf.is_file():
            discard_unrenamed(self.site.conf.resolve())

    def present(self) -> None:
        self._write(Wanted.PRESENT)

    def absent(self) -> None:
        self._write(Wanted.ABSENT)

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.ABSENT:
            return self._what_leads_here()
        lacks = {} if self.request.write else self.lacking(self.site.best())
        clause = f"slurm.conf lacks {format_count(len(lacks), 'line')}"
        return Remainder(clause) if lacks else None

    def lacking(self, conf: SlurmConf) -> dict[str, str]:
        """Return what a configuration must hold and does not."""
        request = self.request
        return wanted_slurm_keys(conf, request.paths, self.settings, request.spank, self.site.conf)

    def _path(self, wanted: Wanted) -> Path | None:
        """Return the file that is written, None where none has a block; raise InstallError."""
        path = self.site.conf.resolve() if self.site.conf else None
        if path is not None and self.site.conf != FETCHED_CONF and path.is_file():
            return path
        if wanted is Wanted.ABSENT:
            return None
        raise InstallError(
            f"slurm.conf of this node is {self.site.conf or 'not known'}, which is not the"
            " cluster's own: run it with --write-conf where slurmctld runs"
        )

    def _text(self, path: Path) -> str:
        return read_file(path) or ""

    def _after(self, path: Path, split: SplitConf, wanted: Wanted) -> str:
        """Return the file as it is to be; raise InstallError where a person has to decide."""
        check_block(path, split.lines or ())
        if wanted is Wanted.ABSENT:
            kept = [line for line in split.lines or () if line.partition("=")[0] in self._kept()]
            return split.with_lines(kept)
        lines = self._block(path, split)
        if lines != list(split.lines or ()):
            check_unmanaged(path, split.rest)
            check_other_nodes(self.site, self.request.installed_everywhere)
        return split.with_lines(lines)

    def _block(self, path: Path, split: SplitConf) -> list[str]:
        """Return the lines of the block; raise InstallError for a key that stands elsewhere."""
        rest = read_outside_block(path, split)
        wanted = self.lacking(rest)
        if site := [key for key, value in wanted.items() if not value]:
            raise InstallError(
                f"the site's {site[0]}={rest.get(site[0])} is to run beside gpulock's: edit it by"
                " hand, as it is printed without --write-conf"
            )
        check_stands_once(path, split, wanted)
        return [f"{key}={value}" for key, value in wanted.items()]

    def _kept(self) -> Collection[str]:
        """Return the keys of the block that stay for now: no Epilog goes while jobs hold GPUs."""
        busy = not self.request.force and self.busy_nodes()
        return (EPILOG, "PrologFlags") if busy else ()

    def busy_nodes(self) -> list[str]:
        """Return the nodes on which Slurm's jobs hold GPUs, or end; raise SlurmError."""
        shown = self.site.scontrol("-d", "show", "node", "-o")
        return list_busy_nodes(shown, self.settings.slurm_gres)

    def _out_of_force(self, wanted: Wanted, text: str) -> bool:
        """Return whether slurmctld goes by less or by more than a text; raise SlurmError."""
        conf = self.site.in_force()
        if wanted is Wanted.PRESENT:
            return bool(self.lacking(conf))
        hooks = find_slurm_hooks(conf, self.request.paths, self.site.conf)
        own = [hook for hook in hooks if str(PATHS[hook.key](self.request.paths)) in hook.values]
        return any(f"{hook.key}=" not in text for hook in own)

    def _write(self, wanted: Wanted) -> None:
        """Write, reconfigure once, and read what is in force; raise InstallError."""
        path = self._path(wanted)
        assert path is not None
        split = split_slurm_conf(path, self._text(path))
        after = self._after(path, split, wanted)
        if after != self._text(path):
            had = path.stat()
            write_file(path, after, stat.S_IMODE(had.st_mode), (had.st_uid, had.st_gid))
        self.site.scontrol("reconfigure")
        if self._out_of_force(wanted, after):
            do = "make the same change there, then scontrol reconfigure; run it again"
            raise InstallError(f"slurmctld does not go by {path}: {do}")

    def _what_leads_here(self) -> Remainder | None:
        """Return what a person has to take out before the hooks may go."""
        if self.request.write and (self.site.conf or Path()).is_file():
            path = self.site.conf or Path()
            left = split_slurm_conf(path, self._text(path)).lines
            if left and self._kept():
                nodes = self.busy_nodes()
                more = " ..." * (len(nodes) > MOST_NAMED)
                where = f"{' '.join(nodes[:MOST_NAMED])}{more}"
                return Remainder(f"Epilog stays while Slurm's jobs hold GPUs on {where}")
        if self.request.force:
            return None
        try:
            stays = not self.request.write
            lines = slurm_hook_references(self.site, self.request.paths, stays)
        except InstallError as fault:
            return Remainder(f"{UNSURE}: {fault}")
        do = "take out what is named above, everywhere, then scontrol reconfigure, and run it again"
        return Remainder(f"Slurm still starts the hooks; {do}", lines) if lines else None


def list_busy_nodes(shown: str, gres: Collection[str]) -> list[str]:
    """Return the nodes of `scontrol -d show node -o` with GPUs in use or jobs that end; pure."""
    names = "|".join(map(re.escape, gres))
    used = re.compile(rf"\bGresUsed=(?:\S*,)?(?:{names})(?::[^:\s,()]+)?:[1-9]")
    ends = re.compile(r"\bState=\S*COMPLETING")
    busy = [line for line in shown.splitlines() if used.search(line) or ends.search(line)]
    return [line.partition(" ")[0].partition("=")[2] for line in busy]


def lines_outside_block(path: Path, split: SplitConf) -> Iterator[tuple[Path, str, str]]:
    """Yield the lines of a file and of those it includes, as `raw_slurm_lines`, but the block's."""
    own = split.lines or ()
    for file, raw, bare in raw_slurm_lines(path):
        if not (file == path and raw in own):
            yield file, raw, bare


def read_outside_block(path: Path, split: SplitConf) -> SlurmConf:
    """Return what a file sets without the block; raise InstallError."""
    pairs = [one for _, _, bare in lines_outside_block(path, split) for one in slurm_pairs(bare)]
    return SlurmConf({key.lower(): value for key, value in pairs}, str(path))


def check_stands_once(path: Path, split: SplitConf, wanted: Mapping[str, str]) -> None:
    """Raise InstallError for a key that stands outside of the block, with both lines."""
    for file, raw, bare in lines_outside_block(path, split):
        keys = {key.lower() for key, _ in slurm_pairs(bare)}
        if found := [key for key in wanted if key.lower() in keys]:
            lines = [f"    {key}={wanted[key]}" for key in found]
            raise InstallError(
                f"{file} sets {' '.join(found)} already: change that by hand as shown above, and"
                " run it again",
                [f"in {file}:", "", f"    {raw.strip()}", "", "is to have:", "", *lines, ""],
            )


def check_unmanaged(path: Path, text: str) -> None:
    """Raise InstallError for a file that says that another program writes it."""
    for line in text.splitlines()[:_HEAD]:
        if _MANAGERS.search(line):
            raise InstallError(
                f"{path} says `{line.strip()}`: put the lines that are printed without --write-conf"
                " into its template"
            )


def check_other_nodes(site: SlurmSite, installed: bool) -> None:
    """Raise InstallError where nodes may be without gpulock: their next job would drain them."""
    others = list_other_nodes(site.scontrol("show", "node", "-o"), site.nodes, os.uname().nodename)
    if others and not installed:
        more = " ..." * (len(others) > MOST_NAMED)
        raise InstallError(
            f"other nodes have this slurm.conf ({' '.join(others[:MOST_NAMED])}{more})."
            f" {' '.join(INSTALL_FIRST)} Then add --installed-everywhere"
        )
