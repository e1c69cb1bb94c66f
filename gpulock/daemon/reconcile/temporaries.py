# SPDX-License-Identifier: Apache-2.0
"""What processes left half written that are gone: removed every 30 s, and by `gpulock reap`.

Warm. Nobody reads such a file, so its removal waits for no reconcile, and none waits for it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Final

from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.node.context import Node
from gpulock.store import atomic

TEMPORARY: Final = re.compile(
    r"\..+\.([1-9][0-9]{0,9})\.[0-9a-f]{12}"
)  # atomic.replace_file: its pid


class TemporaryRemover(Chore):
    """The chore of gpulockd.

    A writer that lives, or may live, keeps its file. Where one of another pid namespace loses it,
    its rename fails, and so does what it was about. What is in a job's spool directory or in a
    lock goes with that; the exporter looks after its own folder.
    """

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Remove what is left, where processes can be seen."""
        if report.blind:
            return
        settings = node.settings
        tops = (settings.lock_dir, node.store.root, settings.state_dir)
        folders = {*tops, settings.cdi_dir} - {""}
        for top in tops:
            with suppress(OSError), os.scandir(top) as entries:
                folders |= {entry.path for entry in entries if entry.is_dir(follow_symlinks=False)}
        ours = {node.store.locks_dir, node.store.claims_dir, node.store.finished_dir}
        for folder in sorted(folders - ours):
            with suppress(OSError):
                for name in os.listdir(folder):
                    writer = TEMPORARY.fullmatch(name)
                    if writer and not os.path.lexists(f"{node.proc.root}/{writer[1]}"):
                        atomic.remove_quietly(f"{folder}/{name}")
