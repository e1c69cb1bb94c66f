# SPDX-License-Identifier: Apache-2.0
"""What an administrator is told to put into slurm.conf."""

from __future__ import annotations

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
