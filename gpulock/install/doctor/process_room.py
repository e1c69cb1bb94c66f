# SPDX-License-Identifier: Apache-2.0
"""Whether one user's jobs can take every process that execd's shepherds need.

A shepherd that cannot fork before the prolog puts each queue of its host in error
(docs/facts/grid-engine.md, processes that run out).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import Finding, warning
from gpulock.node.settings import Settings

_UNLIMITED: Final = 1 << 62
_KERNEL: Final = ("pid_max", "threads-max")  # of proc(5), below /proc/sys/kernel


def check_process_room(
    lines: Mapping[str, str], settings: Settings, execd: int
) -> Iterator[Finding]:
    """Warn where what one user may have is not less than what there is; raise OSError, ValueError.

    `lines` is the configuration in force for the host.
    """
    proc, cgroups = Path(settings.proc_root), Path(settings.sys_root, "fs/cgroup")
    most = parse_process_limit(
        lines.get("execd_params", ""), (proc / str(execd) / "limits").read_text()
    )
    room = min(
        *(int((proc / "sys/kernel" / name).read_text()) for name in _KERNEL),
        read_cgroup_room((proc / str(execd) / "cgroup").read_text(), cgroups),
    )
    if most >= room:
        what = f"one user's jobs can take all {room} processes: that stops every queue of the host"
        do = f"set H_MAXPROC={room // 4} in execd_params; TasksMax=infinity in execd's unit"
        yield warning(what, do)


def parse_process_limit(params: str, limits: str) -> int:
    """Return how many processes a user may have: H_MAXPROC, else what jobs inherit; pure."""
    given = re.findall(r"(?i)\bH_MAXPROC=(\d+)\b", params)
    inherited = re.findall(r"(?m)^Max processes +\S+ +(\d+)", limits)
    return int((given or inherited or [_UNLIMITED])[-1])


def read_cgroup_room(text: str, cgroups: Path) -> int:
    """Return the least pids.max of a cgroup and of those above it; `text` is /proc/PID/cgroup."""
    found = [_UNLIMITED]
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        top = cgroups / "pids" if controllers else cgroups
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            if (limit := place / "pids.max").is_file():
                words = limit.read_text().strip()
                found.append(_UNLIMITED if words == "max" else int(words))
            if place == top:
                break
    return min(found)
