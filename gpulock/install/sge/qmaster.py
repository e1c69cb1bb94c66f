# SPDX-License-Identifier: Apache-2.0
"""What qmaster says of a host: its configuration, the hooks in force there, its queues."""

from __future__ import annotations

from collections.abc import Mapping

from gpulock.install.sge.qconf import Qconf, QconfError, is_sge_none, parse_complexes


def read_complexes(qconf: Qconf) -> dict[str, str]:
    """Return the line of each complex by name; raise QconfError."""
    return parse_complexes(qconf.run("qconf", "-sc"))


def effective_sge_hook(
    qconf: Qconf, queue: str, host: str, name: str, lines: Mapping[str, str] | None = None
) -> str | None:
    """Return the hook that runs for a queue's jobs on a host: the queue's, the host's, the global.

    exec_job.c of 8.1.9: a queue's value that is not NONE replaces the configuration's, which may
    be given as `lines`.
    """
    value = qconf.show("-sq", f"{queue}@{host}").get(name)
    if is_sge_none(value):
        value = (effective_host_conf(qconf, host) if lines is None else lines).get(name)
    return None if is_sge_none(value) else value


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
