# SPDX-License-Identifier: Apache-2.0
"""Whatever is installed, edited and uninstalled, in any order: the text of the site stays."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gpulock.install.slurm.conf_block import split_slurm_conf
from tests.support.slurm_node import SlurmNode

pytestmark = pytest.mark.slow
STEPS = 12


class Site:
    """A node whose administrator writes to slurm.conf between the runs of gpulock."""

    def __init__(self, node: SlurmNode, seed: int) -> None:
        self.node, self.draw = node, random.Random(seed)
        self.text = node.conf.read_text()  # what stands outside of gpulock's block

    def edit(self, change: Callable[[str], str]) -> None:
        """Change what is the site's; the block stays where it is."""
        split = split_slurm_conf(self.node.conf, self.node.conf.read_text())
        self.text = change(self.text)
        lines = split.lines or ()
        self.node.conf.write_text(split_slurm_conf(self.node.conf, self.text).with_lines(lines))

    def step(self) -> None:
        """Do one thing; nothing of it may touch what is the site's."""
        node, number = self.node, self.draw.randrange(1 << 16)
        self.draw.choice(
            [
                node.install,
                lambda: node.install(write_conf=True),
                lambda: node.install(write_conf=True, installed_everywhere=True),
                node.uninstall,
                lambda: node.uninstall(write_conf=True),
                lambda: node.uninstall(write_conf=True, force=True),
                lambda: self.edit(lambda text: f"{text}NodeName=n{number} CPUs=4  # a rack\n"),
                lambda: self.edit(lambda text: f"# of March {number}\n{text}"),
                lambda: self.edit(lambda text: text.rstrip("\n")),
                node.reconfigure,
            ]
        )()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_not_gpulocks_stays_to_the_byte(node: SlurmNode, seed: int) -> None:
    site = Site(node, seed)
    for _ in range(STEPS):
        site.step()
        split = split_slurm_conf(node.conf, node.conf.read_text())
        assert split.rest == site.text

    assert node.uninstall(write_conf=True).clauses() == []
    assert node.conf.read_text() == site.text
    assert not node.hooks.exists() and not node.map.exists()
    assert node.uninstall(write_conf=True).changed == []
