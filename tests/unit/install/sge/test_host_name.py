# SPDX-License-Identifier: Apache-2.0
"""A machine is the execution host that Grid Engine has under this machine's name."""

from __future__ import annotations

import pytest

from gpulock.install.sge.site import choose_sge_host


@pytest.mark.parametrize(
    ("hosts", "alias", "host"),
    [
        (["node1", "node2"], "", "node1"),
        (["node1.example.org", "node2"], "", "node1.example.org"),
        (["Node1"], "", "Node1"),
        (["node1", "gpu-7"], "gpu-7", "gpu-7"),
        (["GPU-7"], "gpu-7", "GPU-7"),
        (["node1.a", "node1.b"], "", ""),
        (["node2"], "", ""),
    ],
)
def test_a_machine_is_one_host_by_its_name_or_its_alias(
    hosts: list[str], alias: str, host: str
) -> None:
    assert choose_sge_host(hosts, "node1", alias) == host
