# SPDX-License-Identifier: Apache-2.0
"""gpulock's SPANK plugin, which the Makefile of prolog/spank compiles for a node's Slurm.

Slurm loads a plugin of its own major and minor release alone, so there is no binary to ship. It
runs the TaskProlog hook on the node, where pyxis would run it inside a container.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, find_share_folder, remove_file
from gpulock.install.items import Item, Remainder, Wanted
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.versions import FOLDER as HOOKS
from gpulock.store import atomic

FOLDER: Final = "prolog/spank"
SOURCE: Final = f"{FOLDER}/spank_gpulock.c"
EVERYWHERE: Final = "on every node and login node"
_MARK: Final = re.compile(rb"gpulock-spank-build 0x([0-9a-f]{2})([0-9a-f]{2})[0-9a-f]{2} (\w+)\0")
_LARGEST: Final = 1 << 22  # bytes of a plugin
_SLURM: Final = Path("/usr")  # of the Makefile


class SpankPlugin(Item):
    """The compiled plugin: an administrator makes it, and it goes with the hooks."""

    def __init__(
        self,
        path: Path,
        hook: Path = Path(),
        site: SlurmSite | None = None,
        needs: tuple[Item, ...] = (),
    ) -> None:
        self.path, self.hook, self.site, self.needs = path, hook, site, needs
        self.title = f"SPANK plugin {path}"

    def wanted(self) -> str:
        """Return what one is for this node's Slurm and hook; raise InstallError."""
        assert self.site is not None
        major, minor = self.site.release()
        made = hashlib.sha256(spank_source().read_bytes() + os.fsencode(self.hook))
        return f"Slurm {major}.{minor:02} {made.hexdigest()[:12]}"

    def read(self) -> str | None:
        """Return what is there, None for nothing; raise InstallError."""
        try:
            found = _MARK.search(atomic.read_file(str(self.path), _LARGEST))
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; look at it") from fault
        if not found:
            return "another program"
        return f"Slurm {int(found[1], 16)}.{int(found[2], 16):02} {found[3].decode()}"

    def show(self, wanted: Wanted) -> list[str]:
        return [f"  - {self.path}"] if wanted is Wanted.ABSENT and self.read() else []

    def absent(self) -> None:
        remove_file(self.path)

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.ABSENT or (now := self.read()) == self.wanted():
            return None
        clause = f"{self.path} is {now or 'missing'}, and slurmd wants {self.wanted()}"
        needed = "It needs make, cc, and slurm/spank.h of this Slurm (libslurm-dev, slurm-devel)."
        return Remainder(
            clause,
            [f"As root, {EVERYWHERE}, then run this again:", f"    {self.command()}", needed],
        )

    def command(self) -> str:
        """Return the command that compiles it."""
        assert self.site is not None
        words = ["make", "-C", str(find_share_folder() / FOLDER), "install"]
        tops = (self.site.slurmd.parent.parent, self.site.binaries.parent, _SLURM)
        top = next((one for one in tops if (one / "include/slurm/spank.h").is_file()), _SLURM)
        words += [f"PREFIX={self.path.parent}"] if self.path.parent != HOOKS else []
        return shlex.join([*words, *([f"SLURM={top}"] if top != _SLURM else [])])


def spank_source() -> Path:
    """Return where the plugin's source is."""
    return find_share_folder() / SOURCE
