# SPDX-License-Identifier: Apache-2.0
"""What `install sge` offers besides, and what an administrator's answer does."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from gpulock.cli.admin import offers
from gpulock.cli.admin.install import run_installer
from gpulock.cli.admin.offers import Consent
from gpulock.cli.session import CommandRefusedError, Session
from gpulock.daemon.core.instance_lock import InstanceLock
from gpulock.install.change import InstallRecord
from gpulock.install.hooks import InstallError
from gpulock.install.planner import InstallPlan
from gpulock.install.sge.install import plan_sge
from gpulock.install.sge.uninstall import SgeUninstaller
from gpulock.install.systemd import manager
from gpulock.node.settings_file import read_settings
from tests.support.install_site import Site, ignore, make_site

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Give a node on which qmaster runs as well."""
    made = make_site(tmp_path, monkeypatch)
    (made.root / "root/default/common/act_qmaster").write_text("node1.example.org\n")
    return made


def consent(site: Site, yes: bool = False, person: bool = False, dry_run: bool = False) -> Consent:
    made = Consent(Session(str(site.config)), yes, dry_run)
    made.person = person
    return made


def planned(site: Site, answer: Consent) -> InstallPlan:
    plan = plan_sge(site.options())
    answer.note_trial(plan)
    return plan


def jsv_url(site: Site) -> str:
    return next(line for line in site.show("sconf").splitlines() if line.startswith("jsv_url"))


def test_the_verifier_is_named_and_nothing_global_is_written(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who writes the global configuration undoes what somebody else writes at the same time."""
    before = site.show("sconf")

    run_installer(lambda: plan_sge(site.options()), False, consent(site, yes=True))

    shown = capsys.readouterr().out
    assert f"qconf -mconf: jsv_url script:{site.root}/libexec" in " ".join(shown.split())
    assert shown.splitlines()[-1].startswith("no trial job: ")  # there is no qsub here
    assert site.show("sconf") == before


@pytest.mark.parametrize(("answer", "words"), [(True, "xid missing"), (False, "")])
def test_the_answer_on_quarantine_is_in_the_settings_and_stays_there(
    site: Site, answer: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(question: str, **_: object) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr(click, "confirm", confirm)
    person = consent(site, person=True)

    plan = plan_sge(site.options(quarantine_on=person.choose_policy(None)))
    plan.apply(ignore)

    assert (
        asked[0] == "Let gpulockd take a GPU that fails out of service (QUARANTINE_ON=xid missing)?"
    )
    assert SgeUninstaller(site.config, ignore).uninstall() == []
    assert f"\nQUARANTINE_ON={words}\n" in site.config.read_text()


def test_without_an_answer_nothing_of_it_is_done_and_the_way_is_said(site: Site) -> None:
    plan = planned(site, consent(site))

    assert [change for change in plan.changes if "jsv_url" in change.what] == []
    assert f"qconf -mconf: jsv_url script:{site.root}/libexec" in "\n".join(plan.notes)
    assert any(note.startswith("admin_user is sgeadmin: qlogin, and") for note in plan.notes)
    assert plan.notes[-1] == "no trial job is run: --yes runs one"


def test_it_is_named_neither_elsewhere_nor_over_the_sites_own(site: Site) -> None:
    def names_verifier() -> bool:
        return "jsv_url" in "".join(plan_sge(site.options()).notes)

    master = site.root / "root/default/common/act_qmaster"
    assert names_verifier()
    master.write_text("master\n")
    assert not names_verifier()
    master.unlink()
    assert not names_verifier()

    master.write_text("node1\n")
    site.edit("sconf", jsv_url(site), "jsv_url script:/site/jsv")
    assert not names_verifier()


def test_hooks_stay_while_a_verifier_set_by_hand_needs_them(site: Site) -> None:
    """qmaster would refuse every submission without it."""
    plan_sge(site.options()).apply(ignore)
    url = f"jsv_url script:{site.root}/libexec/current/prolog/sge-jsv"
    site.edit("sconf", jsv_url(site), url)

    left = SgeUninstaller(site.config, ignore).uninstall()

    assert left == ["qconf -mconf: jsv_url none"]
    assert (site.root / "libexec/current/prolog/sge-jsv").is_file()


def test_a_dry_run_asks_nothing_and_runs_no_job(site: Site) -> None:
    answer = consent(site, yes=True, dry_run=True)
    plan = planned(site, answer)

    plan.trial = None if plan.trial is None else pytest.fail
    answer.run_trial(plan)


def trial_of(what: str | InstallError) -> InstallPlan:
    def trial() -> str:
        if isinstance(what, InstallError):
            raise what
        return what

    return InstallPlan(InstallRecord(Path("/nowhere")), trial=trial)


def test_the_trial_jobs_result_is_shown_and_an_unprotected_one_fails(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    consent(site, yes=True).run_trial(trial_of("trial job 3 ran"))
    assert capsys.readouterr().out == "trial job 3 ran\n"
    consent(site).run_trial(trial_of("trial job 3 ran"))
    assert capsys.readouterr().out == ""
    with pytest.raises(CommandRefusedError, match="no GPU"):
        consent(site, yes=True).run_trial(trial_of(InstallError("no GPU")))


def daemon_note(site: Site, capsys: pytest.CaptureFixture[str]) -> list[str]:
    offers.note_missing_daemon(Session(str(site.config)))
    return capsys.readouterr().out.splitlines()


def test_where_no_systemd_runs_one_sentence_says_that_no_daemon_does(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", site.root / "none")

    assert daemon_note(site, capsys) == [f"note: {offers.NO_SYSTEMD}"]


def test_services_are_named_as_missing_only_while_no_daemon_runs(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", site.root)
    assert daemon_note(site, capsys) == [f"note: {offers.NO_DAEMON}"]

    settings = read_settings(str(site.config))
    Path(settings.lock_dir).mkdir(parents=True, exist_ok=True)
    running = InstanceLock()
    running.take(settings.lock_dir)
    assert daemon_note(site, capsys) == []

    running.release()
    assert daemon_note(site, capsys) == [f"note: {offers.NO_DAEMON}"]
