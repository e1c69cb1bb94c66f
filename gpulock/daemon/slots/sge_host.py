# SPDX-License-Identifier: Apache-2.0
"""Which of Grid Engine's execution hosts this machine is: it may have another name there.

The kernel's name may lack the domain that Grid Engine has, and host_aliases gives any name at all.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_sge_host(hosts: Sequence[str], node: str, alias: str = "") -> str:
    """Return the one of `hosts` that a machine is, as it is written there; empty for none; pure.

    `node` is the kernel's name, `alias` what Grid Engine's gethostname says where it can be asked.
    """
    known = {host.lower(): host for host in hosts}
    short = node.lower().partition(".")[0]
    for name in (alias.lower(), node.lower(), short):
        if name in known:
            return known[name]
    same = [host for host in hosts if host.lower().partition(".")[0] == short]
    return same[0] if len(same) == 1 else ""
