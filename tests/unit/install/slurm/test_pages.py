# SPDX-License-Identifier: Apache-2.0
"""What the administrator is told to put into slurm.conf and gres.conf."""

from __future__ import annotations

from gpulock.install.slurm.texts import SUBMIT_SCRIPT
from tests.support.slurm_node import SlurmNode, told


def test_a_cluster_without_hooks_is_given_the_lines(node: SlurmNode) -> None:
    (page,) = node.parts().pages

    assert page[:9] == [
        "Into slurm.conf, the same on every node and at the controller:",
        "",
        f"    Prolog={node.paths.slurm_prolog}",
        f"    TaskProlog={node.paths.slurm_task}",
        f"    Epilog={node.paths.slurm_epilog}",
        "    # a job's extern step proves that it lives",
        "    PrologFlags=Contain",
        "    # a job that finds no GPU waits again",
        "    RequeueExit=213",
    ]
    assert page[-2] == "Then, at the controller: scontrol reconfigure (no restart is needed)."
    assert "gpulock reap from cron" in page[-1]
    assert "First install gpulock on every node of the cluster, those without GPUs too" in " ".join(
        page
    )


def test_the_sites_own_values_are_kept_in_lists(node: SlurmNode) -> None:
    node.put("RequeueExit", "75,80-82")
    node.put("PrologFlags", "Alloc,NoHold")
    node.put("PrologEpilogTimeout", "30")

    text = told(node)

    assert "waits again\n    RequeueExit=75,80-82,213\n" in text
    assert "# now: Alloc,NoHold; a job's extern step proves" in text
    assert "lives\n    PrologFlags=Alloc,Contain\n" in text
    assert "# now: 30; a hook may take 95 s" in text


def test_hooks_of_the_sites_are_named_with_the_page_that_says_how_ours_run_beside(
    node: SlurmNode,
) -> None:
    node.put("Prolog", "/site/prolog")
    node.put("TaskProlog", "/etc/slurm/task-prolog")

    lines = told(node).splitlines()

    at = lines.index("Prolog=/site/prolog is the site's: take it out if it hands out GPUs itself,")
    assert lines[at + 1] == f"else let {node.paths.slurm_prolog} run beside it:"
    assert any(line.startswith("TaskProlog=/etc/slurm/task-prolog is the") for line in lines)
    assert f"    Epilog={node.paths.slurm_epilog}" in lines
    assert not [line for line in lines if line.startswith(("    Prolog=", "    TaskProlog="))]


def test_without_slurmctld_slurm_conf_is_read(node: SlurmNode) -> None:
    (node.state / "down").touch()
    node.put("Prolog", "/site/prolog", in_force=False)

    text = told(node)

    assert "Unable to contact slurm controller" in text
    assert f"compared with {node.conf}, which may not be in force" in text
    assert "Prolog=/site/prolog is the site's" in text


def test_where_gpulock_chooses_slurm_must_not_set_the_mask(node: SlurmNode) -> None:
    assert "no_gpu_env" not in told(node)
    node.set(SLURM_DEVICE_SELECTION="gpulock")

    text = told(node)
    assert "needs Flags=no_gpu_env on every Name=gpu line" in text and "restart slurmd" in text

    node.conf.with_name("gres.conf").write_text("Name=gpu File=/dev/nvidia0 Flags=no_gpu_env\n")
    assert "no_gpu_env" not in told(node)


def test_a_script_keeps_variables_that_would_drain_a_node_from_jobs(node: SlurmNode) -> None:
    """Without the file slurmctld would not start: who pastes the whole page has a comment."""
    assert f"    #   cp {SUBMIT_SCRIPT} ." in told(node)
    assert "    #JobSubmitPlugins=lua" in told(node)
    assert "job.spank_job_env" in SUBMIT_SCRIPT.read_text()

    node.put("JobSubmitPlugins", "logging,job_submit/lua")  # the site's own, which we do not see
    assert "JobSubmitPlugins" not in told(node)
