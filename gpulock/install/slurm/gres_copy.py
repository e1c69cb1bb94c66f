# SPDX-License-Identifier: Apache-2.0
"""The copy of gres.conf beside the map, by which a prolog sees that the map is stale."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.hooks import InstallError, make_public_folder
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.slurm.slurm_conf import read_slurm_file
from gpulock.store import atomic

LARGEST: Final = 1 << 20  # bytes: a prolog reads no more


@dataclass(frozen=True)
class GresCopy:
    """The copy of gres.conf beside the map; its value is what identifies the bytes."""

    path: Path
    source: Path

    @property
    def address(self) -> tuple[str, ...]:
        """Kind and coordinates."""
        return ("gres-copy", str(self.path), str(self.source))

    @property
    def title(self) -> str:
        """The path."""
        return f"file {self.path}"

    def read(self) -> str | None:
        """Return what identifies the copy."""
        return gres_conf_identity(self.path) if self.path.exists() else None

    def write(self, value: str | None) -> None:
        """Copy the file, if it still is what the map was made from, or remove the copy."""
        try:
            if value is None:
                self.path.unlink(missing_ok=True)
                return
            if gres_conf_identity(self.source) != value:
                raise InstallError(f"{self.source} was changed meanwhile; run it again")
            make_public_folder(self.path.parent)
            atomic.replace_file(str(self.path), read_slurm_file(self.source), 0o644)
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; are you root?") from fault


def gres_conf_identity(path: Path) -> str:
    """Return what tells one text of gres.conf from another; raise InstallError."""
    data = read_slurm_file(path)
    if len(data) > LARGEST:
        raise InstallError(f"{path} is larger than {LARGEST} bytes, which no hook reads")
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}"


def find_gres_conf(site: SlurmSite) -> Path | None:
    """Return this node's gres.conf, without a link at its end: no hook follows one."""
    path = site.gres_conf
    if path is None or not path.exists():
        return None
    return path.resolve() if path.is_symlink() else path


def has_gres_flag(gres_conf: Path, flag: str = "no_gpu_env") -> bool:
    """Say whether gres.conf sets a flag for GPUs, for whichever node."""
    return (
        gres_conf.exists() and flag in read_slurm_file(gres_conf).decode("utf-8", "replace").lower()
    )
