# SPDX-License-Identifier: Apache-2.0
"""A driver gone mad: whatever it says, no counter falls and no value is told that cannot be.

The chain is the exporter's own (NVML source in its process, frame, book, files, text) on a clock
that the test moves, with a restart now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from gpulock_exporter.files.publish import ExporterFolder
from gpulock_exporter.files.sample_file import restore_exporter_memory, sample_text
from gpulock_exporter.frame import Frame
from gpulock_exporter.metrics.exposition import collect_families
from gpulock_exporter.metrics.families import render_families

from tests.exporter.whole import Labels, Scrape
from tests.nvml.double import Double, Process
from tests.support.exporter_nodes import Node
from tests.support.exporter_nvml import Eye
from tests.support.trees import BOOT

ERRORS = (1, 2, 3, 4, 6, 7, 9, 10, 13, 15, 16, 18, 25, 28, 999)
ALL_BITS = (1 << 64) - 1
KEYS = {  # and what no card has of it
    "utilization.gpu": (900, ALL_BITS & 0xFFFFFFFF, 101),
    "utilization.memory": (900, 4_000_000_000),
    "energy": (0, 1, ALL_BITS, 1 << 62, 12_345),
    "memory.used": (ALL_BITS, 1 << 60, "200G"),
    "temperature": (2_000_000_000, 255, "-300"),
    "power": (4_294_967_295, 0, 90_000_000),
    "clock.sm": (4_294_967_295, 0),
    "ecc.volatile.corrected.dram": (ALL_BITS, 3, 0),
    "remapped.correctable": (4_294_967_295, 1),
    "nvlink.all.tx_kib": (4_294_967_000, 10, ALL_BITS),
    "pcie.tx_bytes": (4_294_967_000, 10, ALL_BITS),
    "violation.power": (ALL_BITS, 0, 5_000_000_000),
    "clocks.reasons": (ALL_BITS, 0),
    "gpm.2": ("nan", 900, -5, 55),
    "uuid": ("GPU-00000000-0000-0000-0000-00000000c0de", "GPU-????", "../../etc", ""),
    "name": ('"}\\ x', ""),
    "gone": (1,),
}
RATIOS = ("_utilization_ratio", "_active_ratio", "_occupancy_ratio")


class Madhouse:
    """A double that lies, and the exporter's chain behind it."""

    def __init__(self, nvml: Double, eye: Eye, folder: Path, seed: int) -> None:
        self.nvml, self.eye = nvml, eye
        self.random = random.Random(seed)
        self.calls = sorted(nvml.calls())
        self.folder = ExporterFolder(str(folder))
        self.folder.open()
        self.node = Node()
        self.began = 0.0
        self.highest: dict[tuple[str, Labels], float] = {}
        self.uuids: dict[str, str] = {}  # of what is in each place

    def step(self) -> Scrape:
        """Let something happen, look, tell, and check what is told."""
        acts: list[Callable[[], None]] = [
            *(self.lie, self.lie, self.lie, self.lie_of_samples, self.err, self.crowd),
            *(self.split, self.recover, self.recover, self.restart),
        ]
        self.random.choice(acts)()
        frames: list[Frame] = []
        try:
            passes = self.random.choice((0.0, 0.2, 1.0, 1.0, 1.0, 6.0, 400.0))
            frames.append(self.eye.look(processes=self.random.random() < 0.5, after=passes))
        except RuntimeError:
            self.nvml.reset()  # no driver: the worker ends, and the next one opens it again
            self.eye.close()
            self.eye.open()
        if frames:
            self.node.now = max(self.node.now, frames[0].boottime)
            self.began = self.began or frames[0].boottime
        self.node.take(*frames)
        self.folder.write_sample(sample_text(self.node.book, self.node.moment))
        found = Scrape(render_families(collect_families(self.node.snapshot())).decode())
        self.check(found)
        return found

    def check(self, found: Scrape) -> None:
        """Fail where something is told that cannot be."""
        # what takes the place of another card, or was forgotten, begins at nothing
        uuids = {name: one.uuid for name, one in self.node.book.memory.totals.devices.items()}
        new = {uuid for name, uuid in uuids.items() if uuid != self.uuids.get(name)}
        for key in [key for key in self.highest if dict(key[1]).get("uuid") in new]:
            del self.highest[key]
        for key, value in found.totals().items():
            assert value >= self.highest.get(key, 0), key
            self.highest[key] = value
        self.uuids = uuids
        for (name, labels), value in found.values.items():
            if name.endswith(RATIOS):
                assert 0 <= value <= 1, (name, labels)
            if name == "gpulock_gpu_busy_seconds_total":
                seen = found.values["gpulock_gpu_observed_seconds_total", labels]
                assert value <= seen * (1 + 1e-9)
                assert seen <= self.node.now - self.began + 6, "more than there was"
            if name == "gpulock_gpu_memory_used_bytes":
                assert value <= found.values["gpulock_gpu_memory_total_bytes", labels]
        assert all(-50 <= one <= 200 for one in found.all("gpulock_gpu_temperature_celsius"))
        assert all(one <= 5000 for one in found.all("gpulock_gpu_power_watts"))

    def lie(self) -> None:
        """Say what no card has."""
        key = self.random.choice(sorted(KEYS))
        self.nvml.set(f"gpu{self.random.randrange(2)}.{key}", self.random.choice(KEYS[key]))

    def lie_of_samples(self) -> None:
        """Fill the driver's buffer with garbage: 100 entries, 900 %, times of any year."""
        start = self.random.choice((0, 1, 1_700_000_000_000_000, 9_000_000_000_000_000))
        step = self.random.choice((166_667, 1, -166_667, 10**9))
        count = self.random.choice((1, 100, 101, 119))
        percent = self.random.choice((900, 100, 55, 4_000_000_000))
        some = [(abs(start + n * step), percent) for n in range(count)]
        self.nvml.samples(self.random.randrange(2), some)

    def err(self) -> None:
        """Let a call fail."""
        card = self.random.choice((None, 0, 1))
        self.nvml.fail(self.random.choice(self.calls), self.random.choice(ERRORS), gpu=card)

    def crowd(self) -> None:
        """Put processes there that cannot be, and more of them at each call."""
        pids = (0, 1, 4_294_967_295, self.random.randrange(1, 1 << 22))
        processes = [Process(pid, self.random.choice(("512M", "-"))) for pid in pids]
        self.nvml.processes(self.random.randrange(2), processes, self.random.choice((0, 1, 500)))

    def split(self) -> None:
        """Set MIG up anew."""
        self.nvml.split(1, self.random.choice((["3g.71gb", "1g.18gb"], ["7g.141gb"], [])))

    def recover(self) -> None:
        """Take back every lie, and load the driver anew at times."""
        self.nvml.reset()
        self.nvml.set("reload", self.random.randrange(3))

    def restart(self) -> None:
        """Kill the exporter and start it again: it knows what its file says."""
        self.node.book.memory = restore_exporter_memory(self.folder.last(), BOOT, self.node.now)


@pytest.mark.parametrize(
    ("steps", "seeds"),
    [
        pytest.param(200, 1, id="short"),
        pytest.param(2000, 20, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_a_driver_gone_mad_makes_no_counter_fall_and_no_value_that_cannot_be(
    tmp_path: Path, steps: int, seeds: int
) -> None:
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        with Double(folder / "nvml", preset="dgx-h200", gpus=2) as nvml, Eye(nvml) as eye:
            eye.look(processes=True)
            house = Madhouse(nvml, eye, folder / "exporter", seed)
            assert len(house.calls) > 20
            told = 0
            for _ in range(steps):
                told += len(house.step().all("gpulock_gpu_busy_seconds_total"))
            assert told > steps / 10, "it went on telling what it could"
            house.recover()
            eye.look(after=1000)  # lost cards are looked for at least this often
            eye.look(after=6)
            eye.look(after=6)
            frame = eye.look(processes=True, after=6)  # else the last failure of these stands
            assert {one.index for one in frame.devices} == {0, 1}
            assert frame.failures == {}
