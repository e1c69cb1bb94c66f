# SPDX-License-Identifier: Apache-2.0
"""Ask qmaster by Grid Engine's own clients, in an environment of ours and up to a deadline.

The real binary is started, not Debian's wrapper script (6 against 50 ms). qmaster's host may not
answer at all, so gpulockd asks in a thread.
"""

from __future__ import annotations

import os
import re
from typing import Final

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.node.settings import Settings
from gpulock.store import atomic

ANSWER_SECONDS: Final = 20.0
HINT: Final = "is qmaster up?"
PORT: Final = re.compile(r"(?m)^(SGE_(?:QMASTER|EXECD)_PORT)=([0-9]{1,5});")


def ask_qmaster(settings: Settings, program: str, *words: str) -> str:
    """Return what a client prints; raise Refusal for one that is missing, fails or hangs."""
    paths = [f"{folder}/{program}" for folder in client_folders(settings)]
    path = next((path for path in paths if os.access(path, os.X_OK)), "")
    if not path:
        where = settings.sge_binaries or f"{settings.sge_root or 'SGE_ROOT'}/bin"
        raise Refusal(UNKNOWN, f"no {program} in {where}", "set SGE_BINARIES")
    own = {"PATH": "/usr/bin:/bin", "TMPDIR": os.path.dirname(settings.lock_dir)}  # qconf -mattr's
    client = SchedulerProgram(path, {**own, **sge_environment(settings)}, HINT)
    return client.read(list(words), Deadline(ANSWER_SECONDS))


def sge_environment(settings: Settings) -> dict[str, str]:
    """Return by which variables Grid Engine's clients find qmaster."""
    pairs = {
        "SGE_ROOT": settings.sge_root,
        "SGE_CELL": settings.sge_cell,
        **read_cell_ports(settings.sge_root, settings.sge_cell),
        "SGE_SINGLE_LINE": "1",  # qconf breaks long lines else
    }
    return {key: value for key, value in pairs.items() if value}


def read_cell_ports(root: str, cell: str) -> dict[str, str]:
    """Return the ports that a cell's settings.sh has, none where services(5) names them."""
    try:
        text = atomic.read_text(f"{root}/{cell}/common/settings.sh") if root else ""
    except OSError:
        return {}
    return dict(PORT.findall(text))


def client_folders(settings: Settings) -> list[str]:
    """Return where the clients may be: SGE_BINARIES, else below SGE_ROOT/bin, one a machine."""
    if settings.sge_binaries or not settings.sge_root:
        return [settings.sge_binaries] if settings.sge_binaries else []
    top = f"{settings.sge_root}/bin"
    try:
        return [f"{top}/{name}" for name in sorted(os.listdir(top))]
    except OSError:
        return []
