# SPDX-License-Identifier: Apache-2.0
"""What every installer has: items, and what it finds out of the node itself."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.files import InstallError, read_file
from gpulock.install.items import FileItem, Item
from gpulock.node import device_list
from gpulock.node.settings_file import read_settings

SHOW_MASK: Final = "/usr/bin/printenv CUDA_VISIBLE_DEVICES"


def add_settings(text: str | None, wanted: dict[str, str], scheduler: str) -> str:
    """Return the settings file with the keys added that it lacks; pure."""
    present = re.findall(r"(?m)^\s*([A-Z_]+)\s*=", text or "")
    added = "".join(f"{name}={value}\n" for name, value in wanted.items() if name not in present)
    if not added:
        return text or ""
    mark = f"# written by gpulock install {scheduler}; a key that stands here already is kept\n"
    gap = "\n" if text and not text.endswith("\n") else ""
    return f"{text or ''}{gap}{mark}{added}"


class NodePart(ABC):
    """The settings of a node, its items, and what an administrator should know of it."""

    trial = ""  # a job that shows its mask, for an ordinary user
    on_node = True  # else all is the cluster's, and may be written from anywhere

    def __init__(self, config: Path, scheduler: str) -> None:
        self.config_path, self.scheduler = config, scheduler
        try:
            self.settings = read_settings(str(config))
        except Refusal as refusal:
            raise InstallError(f"{refusal.why}; {refusal.do}") from refusal
        self.notes: list[str] = []

    @abstractmethod
    def parts(self) -> Sequence[Item]:
        """Return what is to be there; raise InstallError for what cannot be installed here."""

    @abstractmethod
    def removal(self) -> Sequence[Item]:
        """Return what is to go, of which the last goes first; raise InstallError."""

    def note(self, text: str) -> None:
        """Tell the administrator something."""
        self.notes.append(text)

    def settings_file_item(self, wanted: dict[str, str]) -> FileItem:
        """Return the settings file, with the keys that it lacks; raise InstallError."""
        if faults := self.settings.faults:
            raise InstallError(f"{'; '.join(faults)}; correct the file")
        text = add_settings(read_file(self.config_path), wanted, self.scheduler)
        return FileItem(self.config_path, text)

    def count_gpus(self) -> int:
        """Return how many GPUs this node must have: EXPECTED_GPUS, else what the driver shows.

        That is 0 where neither says so.
        """
        stated = self.settings.expected_gpus
        try:
            shown = len(device_list.read_devices(self.settings.driver_root, self.settings.sys_root))
        except Refusal as refusal:
            self.note(f"{refusal.why}: no GPU job will start here; {refusal.do}")
            return stated
        return stated or shown
