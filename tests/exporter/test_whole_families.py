# SPDX-License-Identifier: Apache-2.0
"""A running exporter tells every series that it owes, of real NVML calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.daemon.health.cards import read_cards, save_cards
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.workstation.process_claims import make_process_owner
from tests.exporter.whole import Whole
from tests.nvml.double import Double
from tests.support.exporter_contract import CONTRACT, PROCESS

# NVML has no call that tells how busy an instance's memory is
PROFILES = ("3g.71gb", "1g.18gb")
FANLESS = (CONTRACT | PROCESS) - {"gpulock_gpu_fan_ratio"}  # the cards of a DGX have none
ALL_AT_WORK = {f"gpu2.mig0.gpm.{metric}": 50 for metric in (1, 2, 3, 5, 10)}


def act(exporter: Whole) -> None:
    """Let happen on a node what counters and verdicts are made of."""
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        exporter.gpulock("claim", "--devices", "1", "--pid", str(process.pid))
        process.kill()
    exporter.gpulock("claim", "--devices", "0,2:gi1.ci0", "--pid", str(os.getpid()))
    exporter.gpulock("reap")
    for device in ("1", "2:gi2.ci0"):
        exporter.gpulock("quarantine", device, "--reason", "a noisy fan")
    share_last_card(exporter)
    pass_checks(exporter)


def pass_checks(exporter: Whole) -> None:
    """Let the first card pass a check, as gpulockd notes it."""
    node = Node(read_settings(str(exporter.config)))
    cards = read_cards(node.settings.state_dir, node.boot_id)
    card, switch = node.devices()[0].bus, "0000:c4:00.0"
    cards.known = {card}
    cards.of(card).found = {"pcie_width": ""}
    cards.xids = {(card, 79): (1, 1.0), (switch, 20009): (1, 1.0)}
    save_cards(node.settings.state_dir, cards)


def share_last_card(exporter: Whole) -> None:
    """Let a process hold a place on a card, as a shard job does."""
    node = Node(read_settings(str(exporter.config)))
    owner = make_process_owner(node, os.getppid(), "alice", "")
    want = ClaimRequest(1, (node.devices()[-1].id,), share=True)
    want.counted = True
    grant = claim_devices(node, owner, want, lambda: make_liveness_judge(node), Deadline(30.0))
    assert grant.owner.devices[0].endswith(".share1")


def test_every_family_has_values_of_nvml(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=4) as nvml:
        nvml.split(2, PROFILES)
        nvml.update({**ALL_AT_WORK, "gpu0.fabric.state": 3})
        with Whole(tmp_path, nvml, settings={"SHARES": "3:4"}) as exporter:
            nvml.load(0, 100)
            exporter.up(2)
            shutil.copy(exporter.folder / "inventory", nvml.node / "run/gpulock")  # as root does
            act(exporter)
            assert exporter.wait_until(lambda s: s.names() >= FANLESS).names() == FANLESS
            exporter.release()
