# SPDX-License-Identifier: Apache-2.0
"""`gpulock claim --model` and `--mig`: a GPU of a kind, and no slice for a plain request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cli_site import Site

ME = ("--pid", str(os.getpid()))


@pytest.fixture
def split(tmp_path: Path) -> Site:
    """Give a node of whole A100 and two with MIG instances."""
    return Site(tmp_path, "a100-mig")


@pytest.fixture
def two_models(tmp_path: Path) -> Site:
    return Site(tmp_path, "two-models")


def granted(site: Site, *words: str) -> list[str]:
    result = site.call("claim", *words, *ME)
    assert result.exit_code == 0, result.output
    return [line.split()[1] for line in result.stdout.splitlines()]


def refused(site: Site, *words: str) -> str:
    result = site.call("claim", *words, *ME)
    assert result.exit_code != 0
    return result.stderr


def test_a_plain_claim_is_a_whole_card(split: Site) -> None:
    assert ":" not in granted(split, "-n", "1")[0]


def test_a_model_is_claimed(two_models: Site) -> None:
    assert granted(two_models, "--model", "h200", "-n", "2") == ["2", "3"]
    assert granted(two_models, "--model", "H200", "-n", "2") == ["2", "3"], "the same again"
    assert "holds GPUs 2, 3 already" in refused(two_models, "--model", "a100", "-n", "2")


def test_one_of_a_kind_is_claimed_without_a_number(split: Site) -> None:
    assert granted(split, "--mig", "3g.40gb") == ["0:gi2.ci0"]
    assert "holds GPU 0:gi2.ci0 already" in refused(split, "-n", "1")


def test_a_kind_that_is_not_here_is_told_with_what_is(two_models: Site) -> None:
    text = refused(two_models, "--model", "v100")
    assert "model v100: this node has a100-sxm4-80gb (4), h200 (4)" in text
    text = refused(two_models, "-n", "5")
    assert "5 GPUs asked for, all of one model: this node has" in text


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "a100", "--mig", "3g.40gb"),
        ("--model", "a100", "--devices", "0"),
        ("--mig", "3g.40gb", "--share"),
        ("--mig", "h200"),
        ("--model", ""),
    ],
)
def test_what_makes_no_sense_together_is_a_wrong_use(split: Site, words: tuple[str, ...]) -> None:
    assert "Usage: " in refused(split, *words)


def test_the_inventory_lists_the_kinds(split: Site) -> None:
    kinds = "3g.40gb (3), 2g.20gb (1), 1g.10gb (2), a100-sxm4-80gb (6)"
    assert f"Kinds that a job may ask for: {kinds}" in split.call("inventory").stdout


def test_the_inventory_lists_several_models(two_models: Site) -> None:
    assert "a100-sxm4-80gb (4), h200 (4)" in two_models.call("inventory").stdout
