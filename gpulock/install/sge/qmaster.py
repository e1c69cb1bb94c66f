# SPDX-License-Identifier: Apache-2.0
"""What qmaster says of a host: its configuration, its queues."""

from __future__ import annotations

from gpulock.install.sge.qconf import Qconf, QconfError, parse_complexes


def read_complexes(qconf: Qconf) -> dict[str, str]:
    """Return the line of each complex by name; raise QconfError."""
    return parse_complexes(qconf.run("qconf", "-sc"))


def effective_host_conf(qconf: Qconf, host: str) -> dict[str, str]:
    """Return the configuration that execd of a host goes by: its own lines before the global."""
    return {**(qconf.configuration("global") or {}), **(qconf.configuration(host) or {})}


def queue_instances(qconf: Qconf) -> list[str]:
    """Return every QUEUE@HOST of the cluster."""
    try:
        return [word for word in qconf.run("qselect").split() if "@" in word]
    except QconfError:  # without a word where there is no queue at all
        if qconf.names("-sql"):
            raise
        return []


def queues_of_host(qconf: Qconf, host: str) -> list[str]:
    """Return the queues that a host has."""
    pairs = [instance.split("@") for instance in queue_instances(qconf)]
    return [queue for queue, name in pairs if name == host]
