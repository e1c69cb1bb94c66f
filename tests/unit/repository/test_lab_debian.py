# SPDX-License-Identifier: Apache-2.0
"""While a lab installs packages no service is started, and afterwards all is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labs.common import debian
from tests.labs.sge.wait import LabError


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "policy-rc.d"
    monkeypatch.setattr(debian, "POLICY", path)
    return path


def test_invoke_rc_d_is_told_no_and_not_asked_any_more_afterwards(policy: Path) -> None:
    with debian.nothing_started(), pytest.raises(LabError, match="failed"):
        debian.run([str(policy), "gridengine-exec", "start"])
    assert not policy.exists()


def test_a_machines_own_policy_stays(policy: Path) -> None:
    policy.write_text("#!/bin/sh\nexit 104\n")
    with debian.nothing_started():
        assert "104" in policy.read_text()
    assert "104" in policy.read_text()


def test_what_is_there_is_not_installed() -> None:
    assert debian.install({"coreutils": "sh"}) is False
