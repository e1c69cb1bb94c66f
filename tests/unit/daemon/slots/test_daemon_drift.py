# SPDX-License-Identifier: Apache-2.0
"""Counts that drifted apart are told once, and no scheduler that is silent holds up gpulockd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.slots import drift
from gpulock.daemon.slots.drift import EVERY, CountDrift, find_slurm_drift
from gpulock.daemon.slots.rsmap import parse_complex_values
from gpulock.slurm.gres_map import LINE
from tests.support.faults import raising
from tests.support.journal import HeardJournal
from tests.support.trees import Box

QCONF = """\
#!/bin/sh
test "$1" = -sel && echo {host} && exit
test "$1 $2" = "-se {host}" || exit 1
test -e {gate} && cat {gate}
printf 'hostname {host}\\ncomplex_values slots=16,gpu={count}\\nuser_lists NONE\\n'
"""


class Site:
    """A node of four devices with a chore, and what it says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gate = root / "gate"
        self.box = Box(root / "node", SGE_ROOT="/opt/sge", SGE_BINARIES=str(root))
        self.journal = HeardJournal()
        self.chore = CountDrift(self.journal)

    def qmaster(self, count: int, host: str = "node1", alias: str = "") -> None:
        """Have qmaster count devices of a host, for which host_aliases may have another name."""
        self._program("qconf", QCONF.format(gate=self.gate, count=count, host=host))
        if alias:
            self._program("gethostname", f"#!/bin/sh\ntest $1 = -aname && echo {alias}\n")

    def _program(self, name: str, text: str) -> None:
        program = self.root / name
        program.write_text(text)
        program.chmod(0o755)

    def go(self, now: float) -> None:
        node = self.box.node()
        report = ReconcileReport([], [])
        report.devices = node.devices()
        self.chore.run(node, report, now)

    def answered(self) -> None:
        """Wait for qmaster's answer, and take it."""
        asking = self.chore.asking
        assert asking is not None
        assert asking.wait(20.0)
        self.go(1.0)

    def said(self) -> list[str]:
        return self.journal.said()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_count_that_fits_is_not_told(site: Site) -> None:
    site.qmaster(4)
    site.go(0.0)
    site.answered()
    assert site.said() == []


def test_a_count_that_drifted_is_told_once(site: Site) -> None:
    site.qmaster(8)
    site.go(0.0)
    site.answered()
    site.go(EVERY)
    site.answered()
    (line,) = site.said()
    assert "Grid Engine counts gpu=8 here, there are 4 devices" in line


@pytest.mark.parametrize(
    ("host", "alias"),
    [("node1.example.org", ""), ("Node1", ""), ("gpu-7", "gpu-7"), ("GPU-7", "gpu-7")],
)
def test_a_host_is_asked_for_by_the_name_that_grid_engine_has_for_it(
    site: Site, host: str, alias: str
) -> None:
    site.qmaster(8, host, alias)
    site.go(0.0)
    site.answered()
    assert len(site.said()) == 1


def test_a_host_that_grid_engine_does_not_have_is_not_told_here(site: Site) -> None:
    site.qmaster(8, "node2")
    site.go(0.0)
    site.answered()
    assert site.said() == []


def test_between_two_questions_nobody_is_asked(site: Site) -> None:
    site.qmaster(8)
    site.go(0.0)
    site.answered()
    site.go(EVERY - 1)
    assert site.chore.asking is None


@pytest.mark.real_time
def test_a_qmaster_that_does_not_answer_holds_up_nobody(site: Site) -> None:
    os.mkfifo(site.gate)  # for the virtual clock, who sleeps there would be late at once
    site.qmaster(8)
    site.go(0.0)
    site.go(1.0)
    assert site.said() == []
    site.gate.write_text("now\n")
    site.answered()
    assert len(site.said()) == 1


def test_after_an_exception_nobody_foresaw_qmaster_is_asked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.qmaster(8)
    with monkeypatch.context() as patch:
        patch.setattr(drift, "ask_own_host", raising(RuntimeError("can't start new thread")))
        site.go(0.0)
        with pytest.raises(RuntimeError):
            site.answered()
    site.go(EVERY)
    site.answered()
    assert len(site.said()) == 1


def test_a_qmaster_that_is_down_is_not_told_here(site: Site) -> None:
    site.go(0.0)
    site.answered()
    assert site.said() == []


def test_consumables_are_read_from_several_lines() -> None:
    text = (
        "hostname node1\ncomplex_values        slots=16,gpu=4, \\\n                      gpuj=2\n"
    )
    assert parse_complex_values(text) == {"slots": "16", "gpu": "4", "gpuj": "2"}
    assert parse_complex_values("complex_values NONE\n") == {}
    assert parse_complex_values("") == {}


def slurm(root: Path, *minors: int) -> dict[str, str]:
    """Return the messages on a map with these minors, on a node of four devices."""
    box = Box(root)
    lines = [f"{place}={minor}" for place, minor in enumerate(minors)]
    (box.state / "slurm-map").write_text("\n".join([LINE, *lines]) + "\n")
    node = box.node()
    return find_slurm_drift(node.settings, node.devices())


def test_a_map_that_fits_is_not_told(tmp_path: Path) -> None:
    assert slurm(tmp_path, 3, 2, 1, 0) == {}


def test_a_position_without_a_card_is_told(tmp_path: Path) -> None:
    (line,) = slurm(tmp_path, 0, 1, 2, 3, 4).values()
    assert "/dev/nvidia4" in line


def test_a_card_that_slurm_does_not_count_is_told(tmp_path: Path) -> None:
    (line,) = slurm(tmp_path, 0, 1, 3).values()
    assert line == "Slurm does not count /dev/nvidia2: see gres.conf"


def test_a_map_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    box = Box(tmp_path)
    (box.state / "slurm-map").write_text("something else\n")
    node = box.node()
    assert list(find_slurm_drift(node.settings, node.devices())) == ["slurm map"]


def test_without_slurm_nothing_is_told(tmp_path: Path) -> None:
    node = Box(tmp_path).node()
    assert find_slurm_drift(node.settings, node.devices()) == {}
