# SPDX-License-Identifier: Apache-2.0
"""`gpulock install` asks what takes a GPU out of service, and sets it where asked."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from gpulock.cli.admin.offers import Consent
from gpulock.cli.session import Session
from gpulock.install.hooks import InstallError
from gpulock.install.node_part import NodePart


def node_part(tmp_path: Path, text: str = "") -> NodePart:
    """Return the part of a node with this settings file."""
    config = tmp_path / "gpulock.conf"
    config.write_text(f"STATE_DIR={tmp_path}\n{text}")
    return NodePart(config, "sge")


def test_the_default_is_told_and_not_written(tmp_path: Path) -> None:
    made = node_part(tmp_path)
    assert made.quarantine_keys(None) == {}
    (note,) = made.notes
    assert "xid missing (QUARANTINE_ON)" in note and "--quarantine-on" in note


def test_what_is_asked_for_is_written_also_that_nothing_is(tmp_path: Path) -> None:
    made = node_part(tmp_path)
    assert made.quarantine_keys("ecc xid") == {"QUARANTINE_ON": "ecc xid"}
    assert made.quarantine_keys("") == {"QUARANTINE_ON": ""}
    assert made.notes == []


def test_what_the_file_says_stands(tmp_path: Path) -> None:
    made = node_part(tmp_path, "QUARANTINE_ON=ecc\n")
    assert made.quarantine_keys(None) == {}
    assert made.notes == []
    with pytest.raises(InstallError, match="says QUARANTINE_ON=ecc; change it there"):
        made.quarantine_keys("xid")


def test_a_word_that_is_no_cause_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="--quarantine-on: fan lost: not one of xid ecc missing"):
        node_part(tmp_path).quarantine_keys("xid fan lost")


def answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bool | None, text: str = ""
) -> tuple[Consent, list[str]]:
    """Return what a person on a terminal answers, and what that person is asked; None: no one."""
    node_part(tmp_path, text)
    asked: list[str] = []

    def confirm(question: str, default: bool) -> bool:
        asked.append(question)
        return default and bool(answer)

    monkeypatch.setattr(click, "confirm", confirm)
    made = Consent(Session(str(tmp_path / "gpulock.conf")), yes=False, dry_run=False)
    made.person = answer is not None
    return made, asked


@pytest.mark.parametrize(("answer", "words"), [(True, "xid missing"), (False, "")])
def test_a_person_is_asked_for_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bool, words: str
) -> None:
    consent, asked = answers(monkeypatch, tmp_path, answer)
    assert consent.choose_policy(None) == words
    assert asked == [
        "Let gpulockd take a GPU that fails out of service (QUARANTINE_ON=xid missing)?"
    ]


@pytest.mark.parametrize("dry_run", [True, False])
def test_yes_agrees_to_the_default(tmp_path: Path, dry_run: bool) -> None:
    node_part(tmp_path)
    consent = Consent(Session(str(tmp_path / "gpulock.conf")), yes=True, dry_run=dry_run)
    assert consent.choose_policy(None) == "xid missing"


@pytest.mark.parametrize(
    ("answer", "option", "text"),
    [(None, None, ""), (False, "ecc", ""), (False, "", ""), (False, None, "QUARANTINE_ON=ecc\n")],
)
def test_nobody_is_asked_without_a_terminal_or_where_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answer: bool | None,
    option: str | None,
    text: str,
) -> None:
    consent, asked = answers(monkeypatch, tmp_path, answer, text)
    assert consent.choose_policy(option) == option
    assert asked == []
