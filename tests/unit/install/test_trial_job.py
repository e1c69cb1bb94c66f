# SPDX-License-Identifier: Apache-2.0
"""The trial job at the end of an installation: what its scheduler says becomes one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.sge.qconf import Qconf
from gpulock.install.trial_job import (
    TrialJobError,
    judge_trial_output,
    run_sge_trial,
    trial_owner,
)

GIVEN = "HOME=/root\nCUDA_VISIBLE_DEVICES=3\nCUDA_DEVICE_ORDER=PCI_BUS_ID\n"
GONE = 'echo "Following jobs do not exist:" >&2\nexit 1\n'
WAITS = """cat <<'END'
job_number:                 12
scheduling info:            queue instance "gpu.q@node1" dropped because it is disabled
                            cannot run in PE "smp"
END
"""
ERROR = """cat <<'END'
job_number:                 12
error reason          1:    11/23/2026 09:00:00 [0:1]: gpulock: no GPU is free
END
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder for clients, of root's job."""
    monkeypatch.delenv("SUDO_UID", raising=False)
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    """Write a client, which notes how it was called."""
    place = folder / name
    place.write_text(f'#!/bin/sh\necho "$@" >>{folder}/{name}.calls\n{text}')
    place.chmod(0o755)


def sge_clients(folder: Path, printed: str, qstat: str) -> Qconf:
    """Return clients of a Grid Engine whose job prints something at once."""
    out = 'while [ "$1" != -o ]; do shift; done\n'
    program(folder, "qsub", f"{out}printf '{printed}' >\"$2\"\necho 12\n")
    program(folder, "qstat", qstat)
    program(folder, "qdel", "")
    return Qconf(folder, {})


def test_a_job_that_got_its_gpu_says_which(folder: Path) -> None:
    qconf = sge_clients(folder, GIVEN.replace("\n", "\\n"), GONE)

    assert run_sge_trial(qconf, "gpu.q@node1", "gpu") == (
        "trial job 12 ran with CUDA_VISIBLE_DEVICES=3"
    )
    asked = (folder / "qsub.calls").read_text()
    assert "-q gpu.q@node1 -l gpu=1 " in asked
    assert not (folder / "qdel.calls").exists()


def test_a_job_that_ran_without_gpulock_is_an_error(folder: Path) -> None:
    qconf = sge_clients(folder, "CUDA_VISIBLE_DEVICES=0\\n", GONE)

    with pytest.raises(TrialJobError, match="trial job 12 ran, and gpulock gave it no GPU"):
        run_sge_trial(qconf, "gpu.q@node1", "gpu")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("made", "why"),
    [
        ('mkfifo "$2"', "not a regular file"),
        ('ln -s /proc/self/environ "$2"', "symbolic link"),
        ('truncate -s 8G "$2"', "longer than"),
    ],
)
def test_an_output_that_its_user_replaced_is_not_waited_for_followed_or_read_whole(
    folder: Path, made: str, why: str
) -> None:
    qconf = sge_clients(folder, GIVEN, GONE)
    seek = 'while [ "$1" != -o ]; do shift; done\n'
    program(folder, "qsub", f"{seek}{made}\necho 12\n")

    with pytest.raises(TrialJobError, match=f"trial job 12 ran, .*{why}"):
        run_sge_trial(qconf, "gpu.q@node1", "gpu")


def test_a_job_that_does_not_start_is_withdrawn_with_the_reasons(folder: Path) -> None:
    qconf = sge_clients(folder, "", WAITS)

    said = run_sge_trial(qconf, "gpu.q@node1", "gpu", seconds=0)

    assert said == (
        "trial job 12 was withdrawn: not over after 0 s"
        ' (queue instance "gpu.q@node1" dropped because it is disabled; cannot run in PE "smp")'
    )
    assert (folder / "qdel.calls").read_text() == "12\n"


def test_a_job_in_error_is_withdrawn_and_an_error(folder: Path) -> None:
    qconf = sge_clients(folder, "", ERROR)

    with pytest.raises(TrialJobError, match=r"trial job 12 failed: .*gpulock: no GPU is free"):
        run_sge_trial(qconf, "gpu.q@node1", "gpu")
    assert (folder / "qdel.calls").read_text() == "12\n"


def test_a_job_of_which_nothing_more_is_heard_is_withdrawn(folder: Path) -> None:
    qconf = sge_clients(folder, "", "echo 'unable to contact qmaster' >&2\nexit 1\n")

    with pytest.raises(InstallError, match="unable to contact qmaster"):
        run_sge_trial(qconf, "gpu.q@node1", "gpu")
    assert (folder / "qdel.calls").read_text() == "12\n"


def test_a_host_that_may_not_submit_is_named(folder: Path) -> None:
    qconf = sge_clients(folder, "", GONE)
    program(folder, "qsub", "echo 'denied: host \"node1\" is no submit host' >&2\nexit 1\n")

    said = run_sge_trial(qconf, "gpu.q@node1", "gpu")

    assert said.startswith("no trial job: qsub ")
    assert 'host "node1" is no submit host' in said


def test_no_output_is_no_gpu() -> None:
    with pytest.raises(TrialJobError):
        judge_trial_output("trial job 1", "")


@pytest.mark.root
def test_the_job_is_of_the_administrator_who_called_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "1234")
    monkeypatch.setenv("SUDO_GID", "1235")
    assert trial_owner() == {"user": 1234, "group": 1235, "extra_groups": ()}
    monkeypatch.setenv("SUDO_UID", "0")
    assert trial_owner() == {}
