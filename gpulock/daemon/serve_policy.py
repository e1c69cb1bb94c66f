# SPDX-License-Identifier: Apache-2.0
"""Whether gpulockd serves users: USER_CLAIMS=yes, and gpulock is installed into no scheduler.

A scheduler's daemon that runs without gpulock's hooks is doctor's to tell.
"""

from __future__ import annotations

import os

from gpulock.node.context import Node
from gpulock.slurm.gres_map import MAP_NAME as SLURM_MAP


def why_users_are_not_served(node: Node) -> str:
    """Return why users are not served, nothing where they are."""
    if not node.settings.user_claims:
        return "USER_CLAIMS is not set"
    return scheduler_from_settings(node)


def scheduler_from_settings(node: Node) -> str:
    """Return which scheduler the hooks were installed for, or nothing."""
    if node.settings.sge_root:
        return "SGE_ROOT is set: Grid Engine owns this node"
    if os.path.exists(f"{node.settings.state_dir}/{SLURM_MAP}"):
        return f"STATE_DIR has a {SLURM_MAP}: Slurm owns this node"
    return ""
