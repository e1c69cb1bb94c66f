# SPDX-License-Identifier: Apache-2.0
"""Hosts are installed at once while an administrator edits the cluster: no edit is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from subprocess import Popen

import pytest

from gpulock.install.sge.queue_hooks import GROUP
from tests.labs.sge.bare_node import Node, bare_node, clear_node, lay_out_node
from tests.labs.sge.config import EXECHOST_VALUES, exechost, table
from tests.labs.sge.lab import GridEngine, without

pytestmark = pytest.mark.lab
OTHER = "glnode2"
# What `gpulock install sge` writes into qmaster for one host.
QMASTER_PART = """
import sys
from gpulock.install.items import Wanted, run_items
from gpulock.install.sge.complexes import Amounts
from gpulock.install.sge.host import HostConfiguration, SgeHost
from gpulock.install.sge.queue_hooks import HOOKS, queue_hooks
from gpulock.install.sge.site import find_own_execd, find_qmaster
from gpulock.install.versions import current_hooks
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
settings = read_settings(DEFAULT_PATH)
qconf = find_qmaster(settings, find_own_execd(settings))
host = SgeHost(qconf, sys.argv[1], current_hooks(settings).folder, None, print)
items = [Amounts(host, {"gpu": 8}), HostConfiguration(host), *queue_hooks(host, *HOOKS)]
run_items(items, Wanted.PRESENT, None, print)
"""


@pytest.fixture
def nodes(sge: GridEngine) -> Iterator[list[Node]]:
    """Give two hosts of a cell whose complexes another host has brought."""
    for first in bare_node(sge):
        second = lay_out_node(sge, OTHER)
        first.install_cluster()
        yield [first, second]
        clear_node(second)
        sge.set_exechost(OTHER, EXECHOST_VALUES)


def global_value(sge: GridEngine, name: str) -> str:
    """Return a list of the global configuration, as an administrator sees it in an editor."""
    shown = sge.qconf("-sconf", "global").replace("\\\n", " ").splitlines()
    return "".join(word for line in shown if line.startswith(name) for word in line.split()[1:])


def edit_cluster(sge: GridEngine, host: str, number: int) -> None:
    """Change the cluster as an administrator does, by whole objects and by attributes."""
    later = f"later{number}"
    sge.set_conf("login_shells", f"{global_value(sge, 'login_shells')},{later}")
    sge.set_complex(f"{later} {later} INT <= YES NO 0 0")
    sge.qconf("-aattr", "exechost", "complex_values", f"{later}=1", host)
    sge.qconf("-aattr", "queue", "load_thresholds", f"{later}=9", "cpu.q")


def take_edits_back(sge: GridEngine, edited: Sequence[str]) -> None:
    """Check that each edit is there, of `edited` each number's host, and take all back."""
    assert len(edited) > 1
    complexes, thresholds = sge.qconf("-sc"), sge.qconf("-sq", "cpu.q")
    kept = global_value(sge, "login_shells").split(",")
    for number, host in enumerate(edited):
        assert f"later{number}" in kept
        assert f"later{number} " in complexes
        assert f"later{number}=1" in sge.qconf("-se", host)
        assert f"later{number}=9" in thresholds
    sge.set_conf("login_shells", ",".join(one for one in kept if "later" not in one))
    sge.qconf("-rattr", "queue", "load_thresholds", "NONE", "cpu.q")
    for host in {*edited}:
        sge.set_exechost(host, EXECHOST_VALUES)
    later = [f"later{number}" for number in range(len(edited))]
    sge.load("-Mc", "complexes", without(sge.qconf("-sc"), later))


def edit_while(
    sge: GridEngine, installers: Sequence[Popen[str]], hosts: Sequence[str]
) -> list[str]:
    """Edit the cluster until all installers have ended well; return the host of each edit."""
    edited: list[str] = []
    while any(one.poll() is None for one in installers):
        host = hosts[len(edited) % len(hosts)]
        edit_cluster(sge, host, len(edited))
        edited.append(host)
    said = [installer.communicate()[0] for installer in installers]
    assert {installer.returncode for installer in installers} == {0}, said
    return edited


def test_two_installers_and_an_administrator_at_once_lose_nothing(nodes: list[Node]) -> None:
    """The global configuration and all complexes were read, and written back a moment later."""
    sge = nodes[0].sge
    with ExitStack() as stack:
        installers = [stack.enter_context(node.installing()) for node in nodes]
        edited = edit_while(sge, installers, [node.name for node in nodes])

    take_edits_back(sge, edited)
    for node in nodes:
        assert f"prolog of queue gpu.q@{node.name}" not in node.install("--dry-run")
        assert "/prolog/drop-env" in sge.qconf("-sq", f"gpu.q@{node.name}")


@pytest.fixture
def forty(nodes: list[Node]) -> Iterator[list[str]]:
    """Give hosts of gpu.q that qmaster alone knows: no execd of one is waited for."""
    sge, hosts = nodes[0].sge, [f"glmany{number}" for number in range(1, 41)]
    lines = "".join(f"10.9.9.{number} {host}\n" for number, host in enumerate(hosts, 1))
    for machine in (sge.master, nodes[0].name):
        with sge.path_in(machine, "/etc/hosts").open("a") as file:
            file.write(lines)
    for host in hosts:
        values = {**exechost(host), "complex_values": "NONE"}
        del values["load_values"], values["processors"]
        sge.load("-Ae", host, table(values))
        sge.qconf("-aattr", "queue", "hostlist", host, "gpu.q")
    yield hosts
    for host in hosts:
        sge.qconf("-dattr", "hostgroup", "hostlist", host, GROUP)
        sge.qconf("-dattr", "queue", "hostlist", host, "gpu.q")
        sge.qconf("-dconf", host)
        sge.qconf("-de", host)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_forty_hosts_and_an_administrator_at_once_lose_nothing(
    nodes: list[Node], forty: list[str]
) -> None:
    first, sge = nodes[0], nodes[0].sge
    assert "prolog of queue gpu.q" in first.install()  # the part of a node, with its execd
    with ExitStack() as stack:
        installers = [stack.enter_context(first.running(QMASTER_PART, host)) for host in forty]
        edited = edit_while(sge, installers, [node.name for node in nodes])

    take_edits_back(sge, edited)
    members, own = sge.qconf("-shgrp", GROUP).split(), sge.qconf("-sconfl").split()
    for host in forty:
        assert host in members and host in own
        assert "prolog/sge-sensor" in sge.qconf("-sconf", host)
        assert "gpu=8" in sge.qconf("-se", host)
        assert "/prolog/drop-env" in sge.qconf("-sq", f"gpu.q@{host}")
