# SPDX-License-Identifier: Apache-2.0
"""gpulockd reports a map of Slurm's positions that does not name the cards of the node."""

from __future__ import annotations

from pathlib import Path

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.slots.slurm_cards import EVERY, SlurmCardComparison, compare_slurm_cards
from gpulock.slurm.gres_map import LINE
from tests.support.journal import HeardJournal
from tests.support.trees import Box


def write_map(box: Box, *minors: int) -> None:
    lines = [f"{place}={minor}" for place, minor in enumerate(minors)]
    (box.state / "slurm-map").write_text("\n".join([LINE, *lines]) + "\n")


def differences(root: Path, *minors: int) -> list[str]:
    """Return the messages on a map with these minors, on a node of four devices."""
    box = Box(root)
    write_map(box, *minors)
    node = box.node()
    return [*compare_slurm_cards(node.settings, node.devices()).values()]


def test_a_map_that_fits_has_no_difference(tmp_path: Path) -> None:
    assert differences(tmp_path, 3, 2, 1, 0) == []


def test_a_position_without_a_card_is_a_difference(tmp_path: Path) -> None:
    assert differences(tmp_path, 0, 1, 2, 3, 4) == [
        "Slurm counts /dev/nvidia4, which the driver does not show"
    ]


def test_a_card_that_slurm_does_not_count_is_a_difference(tmp_path: Path) -> None:
    assert differences(tmp_path, 0, 1, 3) == ["Slurm does not count /dev/nvidia2: see gres.conf"]


def test_a_map_that_cannot_be_read_is_a_difference(tmp_path: Path) -> None:
    box = Box(tmp_path)
    (box.state / "slurm-map").write_text("something else\n")
    node = box.node()
    assert list(compare_slurm_cards(node.settings, node.devices())) == ["map"]


def test_without_slurm_there_is_no_difference(tmp_path: Path) -> None:
    node = Box(tmp_path).node()
    assert compare_slurm_cards(node.settings, node.devices()) == {}


def test_a_difference_is_logged_once_and_its_end_after_the_next_comparison(tmp_path: Path) -> None:
    box, journal = Box(tmp_path), HeardJournal()
    chore, node = SlurmCardComparison(journal), box.node()
    report = ReconcileReport([], [], devices=node.devices())
    write_map(box, 0, 1, 3)
    chore.run(node, report, 0.0)
    assert len(journal.said()) == 1
    write_map(box, 0, 1, 2, 3)
    for now, lines in ((EVERY - 1, 0), (EVERY, 1), (2 * EVERY, 0)):
        chore.run(node, report, now)
        assert len(journal.said()) == lines
