# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job that is refused, and when a node is drained: by policy, and by name."""

from __future__ import annotations

import pytest

from gpulock.errors import BUSY, INVALID_REQUEST, Refusal
from gpulock.node.settings import Settings
from gpulock.slurm import refuse
from gpulock.slurm.call import SlurmHookCall
from tests.support.slurm_site import SILENT, Site, row

SENTENCE = "gpulock: job 12: busy: 2 GPUs asked for; wait"
GONE = "it does not run any more"


def act(
    site: Site, call: SlurmHookCall, kind: str = BUSY, sentence: str = SENTENCE, **keys: str
) -> str:
    """Do what is done for a whole job; return the message."""
    settings = Settings({**site.settings, **keys})
    return refuse.requeue_or_cancel_job(call, settings, Refusal(kind, "why", "do"), sentence)


def interactive(site: Site, job: int = 12, **changes: str) -> SlurmHookCall:
    """Return the call of an srun or salloc."""
    environ = site.environ(job, **changes)
    del environ["SLURM_JOB_STDIN"]
    return SlurmHookCall(environ)


def asked(site: Site) -> list[list[str]]:
    """Return what was done, without what was asked and said."""
    quiet = (["squeue"], ["scontrol", "notify"], ["scontrol", "update"])
    return [c for c in site.calls() if c[:1] not in quiet and c[:2] not in quiet]


@pytest.mark.parametrize(
    ("job", "task", "keys", "done"),
    [
        (15, "1", {}, ["scontrol", "requeue", "14_1"]),
        (14, "3", {}, ["scontrol", "requeue", "14_3"]),
        (14, "3", {"ON_BUSY": "error"}, ["scancel", "14_3"]),
    ],
)
def test_one_task_of_an_array_is_given_back_and_never_the_array(
    site: Site, job: int, task: str, keys: dict[str, str], done: list[str]
) -> None:
    """The last task to start has the array's own id: that id alone means all of them."""
    siblings = [row(n, ArrayJobID="14", ArrayTaskID=str(n)) for n in (15, 16) if n != job]
    site.answers(*siblings, row(job, ArrayJobID="14", ArrayTaskID=task))
    act(site, site.call(job, SLURM_JOB_NUM_NODES="2"), **keys)
    assert asked(site) == [done]
    update = next(call for call in site.calls() if call[:2] == ["scontrol", "update"])
    assert update[2] == f"JobId=14_{task}"


def test_an_array_whose_task_is_not_told_is_left_alone(site: Site) -> None:
    site.answers(row(15, ArrayJobID="14", ArrayTaskID="1"))
    assert act(site, site.call(14, SLURM_JOB_NUM_NODES="2")) == GONE
    assert asked(site) == []


def test_a_component_of_a_heterogeneous_job_is_given_back_with_its_leader(site: Site) -> None:
    """It looks like a batch job of one node, but has no script that its task could give back."""
    site.answers(row(12))
    assert act(site, site.call(13, SLURM_HET_JOB_ID="12")) == "it is requeued"
    assert asked(site) == [["scontrol", "requeue", "12"]]


@pytest.mark.parametrize("batch", ["0", ""])
def test_what_has_no_script_cannot_be_requeued_and_is_cancelled(site: Site, batch: str) -> None:
    site.answers(row(12, BatchFlag=batch))
    assert act(site, interactive(site)) == "it is cancelled"
    assert asked(site) == [["scancel", "12"]]
    assert ["scontrol", "notify", "12", SENTENCE] in site.calls(), "its user waits at a terminal"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (INVALID_REQUEST, {}),
        (BUSY, {"ON_BUSY": "error"}),
    ],
)
def test_what_would_be_refused_again_is_cancelled(
    site: Site, kind: str, keys: dict[str, str]
) -> None:
    site.answers(row(12))
    call = site.call(SLURM_JOB_NUM_NODES="2")
    assert act(site, call, kind, **keys) == "it is cancelled"
    assert asked(site) == [["scancel", "12"]]


def test_a_job_that_cannot_be_cancelled_either_is_said_to_run_on(site: Site) -> None:
    site.answers(row(12))
    site.fails("denied", "scontrol", "scancel")
    assert act(site, site.call(SLURM_JOB_NUM_NODES="2")) == "it cannot be cancelled"


@pytest.mark.parametrize("body", [f"echo '{SILENT}' >&2; exit 1", "exec sleep 600", "kill -9 $$"])
def test_where_slurmctld_is_silent_nothing_is_done_and_that_is_said(site: Site, body: str) -> None:
    site.program("squeue", body)
    assert act(site, site.call(SLURM_JOB_NUM_NODES="2")).startswith("it stays as it is: squeue")
    assert asked(site) == []


@pytest.mark.parametrize(("restarts", "left"), [("0", False), ("1", True), ("x", False)])
def test_a_later_run_of_the_job_is_left_alone(site: Site, restarts: str, left: bool) -> None:
    site.answers(row(12, RestartCnt=restarts))
    told = act(site, site.call(SLURM_JOB_NUM_NODES="2"))
    assert (told, asked(site)) == (
        (GONE, []) if left else ("it is requeued", [["scontrol", "requeue", "12"]])
    )


@pytest.mark.parametrize("later", [{"State": "CANCELLED"}, {"RestartCnt": "1"}])
@pytest.mark.parametrize(
    ("kind", "done"), [(BUSY, ["scontrol", "requeue"]), (INVALID_REQUEST, ["scancel"])]
)
def test_a_job_that_ends_meanwhile_is_not_said_to_be_given_back_nor_to_run_on(
    site: Site, kind: str, done: list[str], later: dict[str, str]
) -> None:
    site.answers(row(12, **later))
    (site.root / "answer").rename(site.root / "later")
    site.answers(row(12))
    moves = f"mv {site.root}/later {site.root}/answer; exit 1"
    site.program(done[0], f'case "$1" in requeue|12) {moves};; esac')
    assert act(site, site.call(SLURM_JOB_NUM_NODES="2"), kind) == GONE
    assert asked(site) == [[*done, "12"]]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ('a "b" c', "a 'b' c"),
        ("a\nJobId=13\x1b[2J", "a?JobId=13?[2J"),
        ("x" * 500, "x" * 197 + "..."),
        ("ä; $(id) `id` \\", "ä; $(id) `id` \\"),
    ],
)
def test_a_sentence_is_one_argument_whatever_stands_in_it(
    site: Site, sentence: str, expected: str
) -> None:
    site.answers(row(12))
    act(site, site.call(SLURM_JOB_NUM_NODES="2"), sentence=sentence)
    assert ["scontrol", "update", "JobId=12", f"AdminComment={expected}"] in site.calls()


def test_a_node_is_drained_by_slurms_own_name_of_it_with_our_reason(site: Site) -> None:
    call = site.call(SLURMD_NODENAME="gpu-7")
    refuse.drain_slurm_node(call, site.node().settings, 'gpulock: GPU 2 "broken"\n')
    reason = "Reason=gpulock: GPU 2 'broken'?"
    assert site.calls() == [["scontrol", "update", "NodeName=gpu-7", "State=DRAIN", reason]]


def test_a_user_waiting_at_a_terminal_learns_of_a_broken_node(site: Site) -> None:
    refuse.drain_slurm_node(interactive(site), site.node().settings, SENTENCE)
    notify, update = site.calls()
    assert notify == ["scontrol", "notify", "12", SENTENCE]
    assert update[3] == "State=DRAIN"
