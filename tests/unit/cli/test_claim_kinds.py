# SPDX-License-Identifier: Apache-2.0
"""`gpulock claim --model` and `--mig`: a GPU of a kind, and no slice for a plain request."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpulock.job import mps
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from tests.support.cli_site import Site
from tests.support.locks import say_mps

ME = ("--pid", str(os.getpid()))


@pytest.fixture
def split(tmp_path: Path) -> Site:
    """Give a node of whole A100 and two with MIG instances."""
    return Site(tmp_path, "a100-mig")


@pytest.fixture
def two_models(tmp_path: Path) -> Site:
    """Give a node of four V100 and, in every other pair of slots, four H200."""
    made = Site(tmp_path)
    for number in (2, 3, 6, 7):
        shown = made.files.driver_root / "gpus" / made.id(number) / "information"
        shown.write_text(shown.read_text().replace("Tesla V100-SXM2-32GB", "NVIDIA H200"))
    return made


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
    for other in (("--model", "v100*", "-n", "2"), ("--model", "h200", "-n", "1")):
        assert "holds GPU 2, 3 already" in refused(two_models, *other)


def test_one_of_a_kind_is_claimed_without_a_number(split: Site) -> None:
    assert granted(split, "--mig", "3g.40gb") == ["0:gi2.ci0"]
    assert "holds GPU 0:gi2.ci0 already" in refused(split, "-n", "1")


def test_a_kind_that_is_not_here_is_told_with_what_is(two_models: Site) -> None:
    text = refused(two_models, "--model", "a100")
    assert "model a100: this node has v100-sxm2-32gb (4), h200 (4)" in text
    text = refused(two_models, "--share")
    assert "no shares of a GPU, but v100-sxm2-32gb (4), h200 (4); ask for whole GPUs" in text
    text = refused(two_models, "-n", "5")
    assert "5 GPUs asked for, all of one model: this node has" in text


def test_shares_are_among_what_there_is(tmp_path: Path) -> None:
    classroom = Site(tmp_path, "classroom")
    there = "rtx-4090 (2), share (4)"
    assert f"Kinds that a job may ask for: {there}\n" in classroom.call("inventory").stdout
    assert f"model h100: this node has {there}; ask" in refused(classroom, "--model", "h100")


@pytest.fixture
def with_mps(tmp_path: Path) -> Site:
    """Give a node whose shares have MPS."""
    made = Site(tmp_path, "classroom")
    with Path(made.config).open("a") as file:
        file.write("SHARE_MPS=yes\n")
    return made


def test_a_share_is_granted_when_its_mps_runs(
    with_mps: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Path] = []

    def start_mps(_: float) -> None:
        waited.extend(with_mps.files.lock_dir.glob("locks/*.share1"))
        node = Node(read_settings(with_mps.config))
        say_mps(node.store, f"{os.getpid()} {node.proc.start(os.getpid())}")

    monkeypatch.setattr(time, "sleep", start_mps)
    assert len(granted(with_mps, "--share")) == len(waited) == 1


def test_a_share_whose_mps_does_not_come_is_given_back(
    with_mps: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "READY_SECONDS", 0.0)
    assert "the MPS of this card is not ready" in refused(with_mps, "--share")
    store = Node(read_settings(with_mps.config)).store
    left = store.read_all_locks().values()
    for lock in left:  # where one of our user's processes was starting a program just then
        store.read_details([lock])
    assert all([lock.owner and lock.owner.draining for lock in left])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--mig h200", "--mig must be a profile as in 3g.40gb, not 'h200'"),
        ("--model a/2", "--model must be a name as in h200 or a100*, not 'a/2'"),
        *(
            (f"--model a100 {other}", "use one of --model, --mig, --share and --devices")
            for other in ("--mig 3g.40gb", "--devices 0", "--share")
        ),
    ],
)
def test_what_makes_no_sense_is_a_wrong_use(split: Site, words: str, why: str) -> None:
    said = refused(split, *words.split())
    assert "Usage: " in said and why in said


def test_a_release_of_one_place_leaves_the_others_of_its_card(site: Site) -> None:
    site.hold_places(3, "12", 0)
    site.hold_places(3, "13", 1)
    words = (f"{site.id(3)}.share0", "--force", "--reason", "x")
    assert site.call("release", *words).stdout == "freed GPU 3 (was job 12 of alice)\n"
    assert [*site.node().store.read_all_locks()] == [f"{site.id(3)}.share1"]
    assert site.call("history", "--device", f"{site.id(3)}.share1").exit_code == 0
