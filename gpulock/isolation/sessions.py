# SPDX-License-Identifier: Apache-2.0
"""The ways round a job's cgroup: a program that leaves it by the user's own login or timer.

Hot. `systemd-run --user`, ssh, cron and at start a user's processes in cgroups of their own. Each
of those is closed to every GPU, but for root: an administrator's nvidia-smi goes on. It takes
version 2; where the node has none, or no systemd, they stay open (docs/isolation.md).
"""

import os

from gpulock.isolation.tree import V2, Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpulock.isolation.policy import Rules

PLACES = (
    "user.slice",
    "system.slice/ssh.service",
    "system.slice/sshd.service",
    "system.slice/cron.service",
    "system.slice/crond.service",
    "system.slice/atd.service",
)


def places(trees: "Iterable[Tree]") -> list[str]:
    """Return the folders of those that the node has."""
    tops = [one.top for one in trees if one.version == V2]
    return [f"{top}/{p}" for top in tops for p in PLACES if os.path.isdir(f"{top}/{p}")]


def close(trees: "Iterable[Tree]", nothing: "Rules") -> None:
    """Close the GPUs to all of them, where that is not done yet; raise OSError."""
    from gpulock.isolation import bpf

    for folder in places(trees):
        if not bpf.is_attached(folder):
            bpf.attach(folder, bpf.assemble(nothing, spare_root=True))


def open_again(trees: "Iterable[Tree]") -> None:
    """Take the programs away, when the site has given up ISOLATION=cgroup; raise OSError."""
    from gpulock.isolation import bpf

    for folder in places(trees):
        bpf.detach(folder)
