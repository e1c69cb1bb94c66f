# SPDX-License-Identifier: Apache-2.0
"""Asking qmaster: in time or not at all, and never believed by halves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal
from gpulock.hooks import subprocess
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.node.settings import Settings
from gpulock.sge import qstat
from gpulock.sge.cull import LayoutError, SgeJob
from tests.support import ocs_jobs

ANSWER = """<?xml version='1.0'?>
<detailed_job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/\
schemas/qstat/detailed_job_info.xsd">
  <djob_info>
    <element>
      <JB_job_number>12</JB_job_number>
      <JB_owner>alice</JB_owner>
      <JB_uid>1000</JB_uid>
      <JB_job_name>&lt;CE_name&gt;gpu&lt;/CE_name&gt;</JB_job_name>
      <JB_hard_resource_list>
        <qstat_l_requests>
          <CE_name>gpu</CE_name>
          <CE_stringval>2</CE_stringval>
          <CE_doubleval>2.000000</CE_doubleval>
          <CE_consumable>1</CE_consumable>
        </qstat_l_requests>
        <qstat_l_requests>
          <CE_name>h_rt</CE_name>
          <CE_doubleval>100.000000</CE_doubleval>
          <CE_consumable>0</CE_consumable>
        </qstat_l_requests>
      </JB_hard_resource_list>
    </element>
  </djob_info>
</detailed_job_info>
"""


@pytest.fixture(autouse=True)
def nothing_left() -> object:
    """No child and no descriptor may be left by any of these tests."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) <= before  # other tests' may be closed meanwhile


def program(tmp_path: Path, text: str) -> Settings:
    """Put a qstat of our own in the place of the real one."""
    path = tmp_path / "qstat"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    (tmp_path / "answer").write_text(ANSWER)
    return Settings(
        {
            "SGE_BINARIES": str(tmp_path),
            "SGE_QSTAT_TIMEOUT": "5",
            "SGE_ROOT": "/opt/sge",
            "SGE_CELL": "cell",
        }
    )


def ask(tmp_path: Path, text: str) -> SgeJob:
    return qstat.query_qmaster_job(program(tmp_path, text), "12", "1")


def refused(tmp_path: Path, text: str) -> None:
    """Expect a refusal."""
    with pytest.raises(Refusal) as caught:
        ask(tmp_path, text)
    assert caught.value.kind == UNKNOWN


def test_the_answer_is_read(tmp_path: Path) -> None:
    found = ask(tmp_path, f"cat {tmp_path}/answer")
    assert (found.number, found.owner, found.uid) == (12, "alice", 1000)
    assert found.requests == [("gpu", 2.0, 1), ("h_rt", 100.0, 0)]


def test_it_is_asked_for_this_job_with_an_environment_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGE_QMASTER_PORT", "1")
    monkeypatch.setenv("LD_PRELOAD_X", "evil")
    ask(tmp_path, f'echo "$@" >{tmp_path}/argv; env >{tmp_path}/env; cat {tmp_path}/answer')
    assert (tmp_path / "argv").read_text() == "-j 12 -xml\n"
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names - {"PWD", "_", "SHLVL", "OLDPWD"} == {"PATH", "SGE_ROOT", "SGE_CELL"}


def test_no_descriptor_of_ours_reaches_it(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w"):
        ask(tmp_path, f"ls -l /proc/self/fd >{tmp_path}/fds; cat {tmp_path}/answer")
    open_files = (tmp_path / "fds").read_text()
    assert "/dev/null" in open_files
    assert "secret" not in open_files


def test_one_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    refused(tmp_path, "exec sleep 600")


def test_one_that_answers_and_does_not_end_is_ended_at_the_deadline(tmp_path: Path) -> None:
    refused(tmp_path, f"cat {tmp_path}/answer; exec >&-; exec sleep 600")


@pytest.mark.real_time
def test_one_that_ignores_every_signal_is_ended_as_well(tmp_path: Path) -> None:
    settings = program(tmp_path, "trap '' TERM INT HUP PIPE; while :; do :; done")
    settings.sge_qstat_timeout = 0.1
    with pytest.raises(Refusal, match="in time"):
        qstat.query_qmaster_job(settings, "12", "1")


def test_an_endless_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "ANSWER_LIMIT", 1 << 16)
    refused(tmp_path, "while :; do cat /proc/self/environ $0; done")


def test_one_that_feeds_us_slowly_is_ended_at_the_deadline(tmp_path: Path) -> None:
    refused(tmp_path, "while :; do echo x; sleep 0.02; done")


@pytest.mark.parametrize("code", ["1", "99", "127"])
def test_one_that_fails_is_not_believed_whatever_it_said(tmp_path: Path, code: str) -> None:
    refused(tmp_path, f"cat {tmp_path}/answer; exit {code}")


def test_one_that_is_killed_is_not_believed(tmp_path: Path) -> None:
    refused(tmp_path, f"cat {tmp_path}/answer; kill -9 $$")


def test_an_answer_cut_off_anywhere_is_never_a_smaller_request(tmp_path: Path) -> None:
    whole = ANSWER.rindex("</detailed_job_info>") + len("</detailed_job_info>")
    for end in range(whole):
        with pytest.raises(ValueError):
            qstat.parse_qstat_job(ANSWER[:end], "12")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<JB_job_number>12<", "<JB_job_number>123<"),
        ("<JB_job_number>12<", "<JB_job_number>1<"),
        ("<JB_job_number>12</JB_job_number>", ""),
        ("<JB_owner>", "<JB_job_number>13</JB_job_number><JB_owner>"),
        ("<JB_uid>1000</JB_uid>", ""),
        ("<JB_uid>1000<", "<JB_uid>x<"),
        ("<JB_owner>alice</JB_owner>", ""),
        ("<CE_doubleval>2.000000</CE_doubleval>", ""),
        ("<CE_doubleval>2.000000<", "<CE_doubleval>two<"),
        ("<CE_consumable>1</CE_consumable>", ""),
        ("<CE_consumable>1<", "<CE_consumable>true<"),
        ("</JB_hard_resource_list>", ""),
        ("</CE_name>", ""),
        (ANSWER, ""),
        (ANSWER, "<unknown_jobs><element><ST_name>12</ST_name></element></unknown_jobs>"),
    ],
)
def test_an_answer_that_is_not_unmistakable_is_refused(old: str, new: str) -> None:
    qstat.parse_qstat_job(ANSWER, "12")
    with pytest.raises(ValueError):
        qstat.parse_qstat_job(ANSWER.replace(old, new, 1), "12")


def test_a_job_without_requests_has_none() -> None:
    begin, end = ANSWER.index("<JB_hard"), ANSWER.index("</element>")
    assert qstat.parse_qstat_job(ANSWER[:begin] + ANSWER[end:], "12").requests == []


@pytest.mark.parametrize(
    "head",
    [
        "<detailed_job_info>",
        '<detailed_job_info xmlns:xsd="http://example.org/qstat/detailed_job_info.xsd">',
    ],
)
def test_an_unknown_qstat_is_refused_also_where_it_names_no_request(head: str) -> None:
    """Its list of requests may have another name: the job would get no GPU, or an open one."""
    begin, end = ANSWER.index("<JB_hard"), ANSWER.index("</element>")
    for answer in (ANSWER, ANSWER[:begin] + ANSWER[end:]):
        body = answer.partition("<djob_info>")[2]
        with pytest.raises(LayoutError, match="not known"):
            qstat.parse_qstat_job(f"{head}<djob_info>{body}", "12")


def test_a_job_that_names_the_schema_does_not_make_an_answer_known() -> None:
    name = qstat.SCHEMA
    answer = f"<detailed_job_info><djob_info>{name}{ANSWER.partition('<djob_info>')[2]}"
    with pytest.raises(LayoutError):
        qstat.parse_qstat_job(answer, "12")


def test_without_sge_binaries_the_clients_are_below_sge_root(tmp_path: Path) -> None:
    folder = tmp_path / "bin/lx-amd64"
    folder.mkdir(parents=True)
    program(folder, f"cat {folder}/answer")
    settings = Settings({"SGE_QSTAT_TIMEOUT": "5", "SGE_ROOT": str(tmp_path)})
    assert qstat.query_qmaster_job(settings, "12", "1").requests[0] == ("gpu", 2.0, 1)


@pytest.mark.parametrize("root", ["", "/nowhere"])
def test_no_program_of_a_distribution_stands_in_for_one_that_is_missing(root: str) -> None:
    with pytest.raises(Refusal, match="no qstat in "):
        qstat.make_sge_client(Settings({"SGE_ROOT": root} if root else {}), "qstat")


@pytest.mark.parametrize("mode", [0o644, 0o000])
def test_a_program_that_may_not_be_run_is_unknown(tmp_path: Path, mode: int) -> None:
    settings = program(tmp_path, "exit 0")
    (tmp_path / "qstat").chmod(mode)
    with pytest.raises(Refusal) as caught:
        qstat.query_qmaster_job(settings, "12", "1")
    assert caught.value.kind == UNKNOWN


def test_a_program_whose_interpreter_is_missing_is_unknown(tmp_path: Path) -> None:
    settings = program(tmp_path, "")
    (tmp_path / "qstat").write_text("#!/no/such/interpreter\n")
    with pytest.raises(Refusal):
        qstat.query_qmaster_job(settings, "12", "1")


def test_time_that_is_up_already_is_still_a_refusal_not_a_hang(tmp_path: Path) -> None:
    program(tmp_path, "exec sleep 600")
    with pytest.raises(Refusal):
        SchedulerProgram(str(tmp_path / "qstat"), {}, "").output([], Deadline(0))


OCS = (ocs_jobs.DATA / "qstat.xml").read_text()


def test_what_open_cluster_scheduler_granted_is_read() -> None:
    """`qsub -pe smp 2 -l gpu=2,card=1`, as 9.1.5 answers."""
    job = qstat.parse_qstat_job(OCS, "1")
    assert (job.number, job.owner, job.uid) == (1, "alice", 2701)
    assert job.requests == [("card", 1.0, 1), ("gpu", 2.0, 1)]
    assert job.granted == [
        ("card", 2.0, [("GPU1", 1), ("GPU2", 1)], "ocs1"),
        ("gpu", 4.0, [], "ocs1"),
    ]


def test_what_was_granted_of_no_complex_is_passed_over() -> None:
    """The binding to cores is a grant without a name."""
    binding = "<element><GRU_type>3</GRU_type><GRU_host>ocs1</GRU_host></element>"
    head = "<JAT_granted_resources_list>"
    job = qstat.parse_qstat_job(OCS.replace(head, head + binding), "1")
    assert job.granted == qstat.parse_qstat_job(OCS, "1").granted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<JAT_task_number>1<", "<JAT_task_number>2<"),
        ("<JAT_task_number>1</JAT_task_number>", "<JAT_task_number>1</JAT_task_number>" * 2),
        ("<GRU_amount>4.000000</GRU_amount>", ""),
        ("<GRU_amount>4.000000<", "<GRU_amount>four<"),
        ("<RESL_amount>1</RESL_amount>", ""),
        ("<GRU_host>ocs1</GRU_host>", ""),
        ("</JAT_granted_resources_list>", ""),
        ("</detailed_job_info>", ""),
        ("<CE_doubleval>2.000000</CE_doubleval>", ""),
    ],
)
def test_its_answer_is_not_believed_by_halves(old: str, new: str) -> None:
    assert old in OCS
    with pytest.raises(ValueError):
        qstat.parse_qstat_job(OCS.replace(old, new, 1), "1")


def test_each_task_of_an_array_has_its_own_grants() -> None:
    begin, end = OCS.index("<JB_ja_tasks>"), OCS.index("</JB_ja_tasks>")
    tasks = OCS[begin + len("<JB_ja_tasks>") : end]
    other = tasks.replace("_number>1<", "_number>7<").replace("GPU1", "GPU3")
    job = qstat.parse_qstat_job(OCS[:end] + other + OCS[end:], "1", "7")
    assert job.granted is not None
    assert job.granted[0][2] == [("GPU3", 1), ("GPU2", 1)]
