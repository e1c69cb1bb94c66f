# SPDX-License-Identifier: Apache-2.0
"""A running exporter tells every series that it owes, of real NVML calls and simulated ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gpulock.alloc.availability import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.node.settings import read_settings
from gpulock.workstation.process_claims import make_liveness_judge, make_process_owner
from tests.exporter.whole import Scrape, Whole
from tests.nvml.double import Double
from tests.support.exporter_contract import CONTRACT

# NVML has no call that tells how busy an instance's memory is
WEB_CONFIG = "# no TLS, no users\n"
PROFILES = ("3g.71gb", "1g.18gb")
ALL_AT_WORK = {f"gpu2.mig0.gpm.{metric}": 50 for metric in (1, 2, 3, 5, 10)}


def settings(folder: Path, **more: str) -> dict[str, str]:
    """Return the settings of an exporter with a web configuration."""
    path = folder / "web-config.yml"
    path.write_text(WEB_CONFIG)
    return {"WEB_CONFIG": str(path), **more}


def act(exporter: Whole) -> None:
    """Let happen on a node what counters and verdicts are made of."""
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        exporter.gpulock("claim", "--devices", "1", "--pid", str(process.pid))
        process.kill()
    exporter.gpulock("claim", "--devices", "0,2:gi1.ci0", "--pid", str(os.getpid()))
    exporter.gpulock("reap")
    share_last_card(exporter)


def share_last_card(exporter: Whole) -> None:
    """Let a process hold a place on a card, as a shard job does."""
    node = Node(read_settings(str(exporter.config)))
    owner = make_process_owner(node, os.getppid(), "alice", "")
    want = ClaimRequest(1, (node.devices()[-1].id,), share=True)
    grant = claim_devices(node, owner, want, lambda: make_liveness_judge(node), Deadline(30.0))
    assert grant.owner.devices[0].endswith(".share1")


def whole(scrape: Scrape) -> bool:
    return scrape.names() >= CONTRACT


def split(node: Path, bus: str) -> None:
    """Put a card of a simulated node into MIG mode, with two instances."""
    path = node / "run/gpulock/inventory"
    lines = [line for line in path.read_text().splitlines() if bus not in line]
    lines.append(f"gpu.{bus}.mig=1")
    for number, profile in enumerate(PROFILES, 1):
        key = f"mig.{bus}.gi{number}.ci0"
        lines += [f"{key}.uuid=MIG-{number}", f"{key}.profile={profile}", f"{key}.memory_mib=16384"]
    for told in (path, node / "nvml"):  # what gpulockd published, and what NVML would say
        told.write_text("\n".join(lines) + "\n")


def test_every_family_has_values_of_nvml(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=4) as nvml:
        nvml.split(2, PROFILES)
        nvml.update(ALL_AT_WORK)
        with Whole(tmp_path, nvml, settings=settings(tmp_path)) as exporter:
            nvml.load(0, 100)
            exporter.up(2)
            shutil.copy(exporter.folder / "inventory", nvml.node / "run/gpulock")  # as root does
            act(exporter)
            nvml.event(0, 79)
            assert exporter.until(whole).names() == CONTRACT
            exporter.release()


def test_every_family_has_values_on_a_simulated_node(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=4) as nvml:
        first, _, third, _ = sorted(os.listdir(nvml.node / "proc/driver/nvidia/gpus"))
        split(nvml.node, third)
        before = nvml.calls()
        own = settings(tmp_path, SIMULATION=str(nvml.node / "simulation"))
        with Whole(tmp_path, nvml, settings=own) as exporter:
            exporter.up(2)
            act(exporter)
            (nvml.node / "telemetry").write_text(f"xid={first}:79\n")
            assert exporter.until(whole).names() == CONTRACT
            exporter.release()
        assert nvml.calls() == before
