# SPDX-License-Identifier: Apache-2.0
"""Asking slurmctld: an answer is believed only where it is whole, and silence is no answer."""

from __future__ import annotations

import pytest

from gpulock.errors import UNKNOWN
from gpulock.slurm import scontrol
from gpulock.slurm.scontrol import SlurmctldClient
from tests.support.faults import refusal
from tests.support.slurm_site import SILENT, UID, Site, row

NOISE = "squeue: error: Configuration option X is deprecated"


def control(site: Site, conf: str = "") -> SlurmctldClient:
    return SlurmctldClient(site.node().settings, conf)


def ask(site: Site, job: int = 12) -> dict[str, str] | None:
    return control(site).job(str(job))


def unknown(site: Site, job: int = 12) -> str:
    found = refusal(lambda: ask(site, job))
    assert found.kind == UNKNOWN
    return found.why


def test_every_field_is_read_from_its_column(site: Site) -> None:
    gres = "gres:gpu:v100:2,gres:nvme:1"
    site.answers(row(12, State="COMPLETING", RestartCnt="3", BatchFlag="0", Gres=gres))
    found = ask(site)
    assert found is not None
    assert (found["JobID"], scontrol.slurm_job_uid(found), found["State"]) == (
        "12",
        UID,
        "COMPLETING",
    )
    assert (found["Restarts"], found["Batch"]) == ("3", "0")
    assert (found["Array"], found["Task"], found["Gres"]) == ("12", "N/A", gres)


def test_the_other_tasks_of_an_array_are_not_this_job(site: Site) -> None:
    siblings = [row(n, ArrayJobID="14", ArrayTaskID=str(n - 14)) for n in (15, 16)]
    own = row(14, State="COMPLETED", ArrayJobID="14", ArrayTaskID="3")
    site.answers(*siblings, own)
    found = ask(site, 14)
    assert found is not None and (found["State"], found["Task"]) == ("COMPLETED", "3")
    site.answers(*siblings)
    assert ask(site, 14) is None


@pytest.mark.parametrize(
    "body",
    [
        f"echo '{SILENT}' >&2; exit 1",
        f"echo '{SILENT}' >&2",
        "exit 0",
        f"echo '{NOISE}'; echo '{NOISE}' >&2",
        "head -c 3000 /dev/zero",
    ],
)
def test_what_is_no_answer_is_unknown(site: Site, body: str) -> None:
    site.program("squeue", body)
    unknown(site)


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$"])
def test_an_answer_of_a_program_that_fails_is_unknown(site: Site, end: str) -> None:
    site.answers(row(12, State="COMPLETED"))
    site.program("squeue", f"cat {site.root}/answer; {end}")
    unknown(site)


def test_a_row_cut_short_is_unknown(site: Site) -> None:
    whole = row(12, State="COMPLETED")
    for end in (2, 24, 40, 48, 60, 100, 190, 1767):
        site.program("squeue", f"printf '%s' '{whole[:end]}'")
        unknown(site)


@pytest.mark.parametrize(
    "body", ["exec sleep 600", "exec >&- 2>&-; exec sleep 600", "sleep 30 & exit 0"]
)
def test_one_that_hangs_is_unknown_at_the_deadline(site: Site, body: str) -> None:
    site.program("squeue", body)
    assert "in time" in unknown(site)


def test_where_it_is_silent_it_is_asked_once_for_all_jobs(site: Site) -> None:
    site.fails(SILENT)
    asked = control(site)
    first = refusal(lambda: asked.job("12"))
    assert refusal(lambda: asked.job("13")) is first
    assert len(site.calls()) == 1


@pytest.mark.parametrize(
    ("setting", "told", "expected"),
    [("", "", ""), ("", "/a", "/a"), ("/b", "", "/b"), ("/b", "/a", "/b")],
)
def test_slurm_conf_is_the_settings_or_slurmds_and_nothing_else_of_the_environment_counts(
    site: Site, monkeypatch: pytest.MonkeyPatch, setting: str, told: str, expected: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/evil")
    monkeypatch.setenv("SLURM_CLUSTERS", "evil")
    site.set(SLURM_CONF=setting)
    site.answers(row())
    site.program("squeue", f"env >{site.root}/env; cat {site.root}/answer")
    control(site, told).job("12")
    lines = [line.partition("=") for line in (site.root / "env").read_text().splitlines()]
    found = {name: value for name, _, value in lines if name not in ("PWD", "_", "SHLVL", "OLDPWD")}
    wanted = {"PATH": "/usr/bin:/bin"}
    assert found == ({**wanted, "SLURM_CONF": expected} if expected else wanted)


@pytest.mark.parametrize(
    ("body", "obeyed"),
    [("exit 0", True), ("exit 1", False), ("kill -9 $$", False), ("exec sleep 60", False)],
)
def test_a_command_was_obeyed_only_where_slurm_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch, body: str, obeyed: bool
) -> None:
    monkeypatch.setattr(scontrol, "ANSWER_SECONDS", 0.3)
    site.program("scontrol", body)
    assert control(site).do("scontrol", "requeue", "12_3") is obeyed
    assert site.calls() == [["scontrol", "requeue", "12_3"]]
