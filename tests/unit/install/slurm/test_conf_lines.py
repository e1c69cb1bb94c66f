# SPDX-License-Identifier: Apache-2.0
"""What an administrator is told to put into slurm.conf, and which nodes are this machine."""

from __future__ import annotations

import pytest

from gpulock.install.slurm.site import own_nodes
from gpulock.install.slurm.wanted import INSTALL_FIRST
from tests.support.slurm_node import SlurmNode, told


def test_a_cluster_without_hooks_is_given_the_lines(node: SlurmNode) -> None:
    (left,) = node.install().remainders

    assert [*left.page] == [
        "Into slurm.conf, on every node and at the controller, in place of what sets the same key:",
        "",
        f"    Prolog={node.paths.slurm_prolog}",
        f"    TaskProlog={node.paths.slurm_task}",
        f"    Epilog={node.paths.slurm_epilog}",
        "    # a job's extern step proves that it lives",
        "    PrologFlags=Contain",
        "    # a job that finds no GPU waits again",
        "    RequeueExit=213",
        "",
        *INSTALL_FIRST,
        "",
        "Then, at the controller: scontrol reconfigure (no restart is needed).",
    ]


def test_the_sites_own_values_are_kept_and_its_hooks_named_with_the_page(node: SlurmNode) -> None:
    values = {"RequeueExit": "75,80-82", "PrologFlags": "Alloc,NoHold", "PrologEpilogTimeout": "30"}
    for key, value in {**values, "Prolog": "/site/prolog", "TaskProlog": "/site/task"}.items():
        node.put(key, value)

    text = told(node)

    for said in (
        "waits again\n    RequeueExit=75,80-82,213\n",
        "# now: Alloc,NoHold; a job's extern step proves",
        "lives\n    PrologFlags=Alloc,Contain\n",
        "# now: 30; a hook may take 95 s",
        "\nProlog=/site/prolog is the site's: take it out if it hands out GPUs itself,\n"
        f"else let {node.paths.slurm_prolog} run beside it: see",
        "\nTaskProlog=/site/task is the site's",
        f"\n    Epilog={node.paths.slurm_epilog}\n",
    ):
        assert said in text
    assert "\n    Prolog=" not in text and "\n    TaskProlog=" not in text


# --- which of slurmctld's nodes are this machine --------------------------------------------------

SHOWN = """NodeName=gpu1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=dgx1.site Version=24.11.5
NodeName=dgx2 Arch=x86_64 NodeAddr=dgx2 NodeHostName=dgx2 Version=24.11.5
NodeName=new State=FUTURE
"""


@pytest.mark.parametrize(
    ("named", "host", "own"),
    [
        ("gpu1", "dgx2", ["gpu1"]),
        ("", "dgx1.site", ["gpu1"]),
        ("", "dgx2", ["dgx2"]),
        ("", "new", ["new"]),
        ("", "controller", []),
    ],
)
def test_the_nodes_of_this_machine_are_known(named: str, host: str, own: list[str]) -> None:
    """A slurmd without -N goes by the machine's name, as Debian's service starts it."""
    found = own_nodes(SHOWN, named, host)
    assert [name for name, _ in found] == own
    assert all(f"NodeName={name} " in line for name, line in found)
