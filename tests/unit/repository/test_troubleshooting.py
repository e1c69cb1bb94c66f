# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md has each state and each kind of refusal."""

from pathlib import Path

import pytest

from gpulock.alloc.states import STATES
from gpulock.errors import KINDS

PAGE = Path(__file__).resolve().parents[3] / "docs/troubleshooting.md"


@pytest.mark.parametrize("word", [*STATES, *KINDS])
def test_each_state_and_each_kind_has_a_row(word: str) -> None:
    assert f"\n| `{word}` |" in PAGE.read_text()
