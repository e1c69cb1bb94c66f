# SPDX-License-Identifier: Apache-2.0
"""Two hosts are installed at once while an administrator edits the cluster: no edit is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from tests.labs.sge.bare_node import Node, bare_node, clear_node, lay_out_node
from tests.labs.sge.config import EXECHOST_VALUES
from tests.labs.sge.lab import GridEngine, without

pytestmark = pytest.mark.lab
OTHER = "glnode2"


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


def test_two_installers_and_an_administrator_at_once_lose_nothing(nodes: list[Node]) -> None:
    """The global configuration and all complexes were read, and written back a moment later."""
    sge = nodes[0].sge
    made: list[int] = []
    with ExitStack() as stack:
        installers = [stack.enter_context(node.installing()) for node in nodes]
        for number in count():
            if all(one.poll() is not None for one in installers):
                break
            node = nodes[number % 2]
            shells = global_value(sge, "login_shells")
            sge.set_conf("login_shells", f"{shells},later{number}")
            sge.set_complex(f"later{number} later{number} INT <= YES NO 0 0")
            sge.qconf("-aattr", "exechost", "complex_values", f"later{number}=1", node.name)
            sge.qconf("-aattr", "queue", "load_thresholds", f"later{number}=9", "cpu.q")
            made.append(number)
        said = [installer.communicate()[0] for installer in installers]

    assert [installer.returncode for installer in installers] == [0, 0], said
    assert len(made) > 1
    table, thresholds = sge.qconf("-sc"), sge.qconf("-sq", "cpu.q")
    kept = global_value(sge, "login_shells").split(",")
    hosts = [sge.qconf("-se", node.name) for node in nodes]
    for number in made:
        assert f"later{number}" in kept
        assert f"later{number} " in table
        assert f"later{number}=1" in hosts[number % 2]
        assert f"later{number}=9" in thresholds
    for node in nodes:
        assert f"prolog of queue gpu.q@{node.name}" not in node.install("--dry-run")
        assert "/prolog/drop-env" in sge.qconf("-sq", f"gpu.q@{node.name}")

    sge.set_conf("login_shells", ",".join(one for one in kept if "later" not in one))
    sge.qconf("-rattr", "queue", "load_thresholds", "NONE", "cpu.q")
    for node in nodes:
        sge.set_exechost(node.name, EXECHOST_VALUES)
    sge.load("-Mc", "complexes", without(sge.qconf("-sc"), [f"later{n}" for n in made]))
