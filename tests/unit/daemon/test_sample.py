# SPDX-License-Identifier: Apache-2.0
"""The reader of the exporter's files: it believes nothing and stumbles over nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.core.sample import (
    FINISHED_LINE,
    SAMPLE_LINE,
    parse_sample,
    read_finished_claim,
    read_sample,
)
from tests.support.trees import BOOT, OTHER_BOOT, bus

NOW = 1000.0
HEAD = f"{SAMPLE_LINE}\nboot_id={BOOT}\nsequence=7\nboottime=999.5\nwall=1700000999.5\ndriver=a b\n"
DEVICE = f"device {bus(0)} uuid=GPU-1 index=0 busy=12.5 observed=20.0 memory_used=4096\n"
TOKEN = f"token feed {bus(0)} since=990.0 width=1.0 used=500,0,0 covered=1000,1000,0 energy=5.5\n"


def written(folder: Path, text: str, name: str = "sample") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.fsencode(text))
    return str(folder)


def test_a_sample_is_read_whole(tmp_path: Path) -> None:
    found = read_sample(written(tmp_path, HEAD + DEVICE + TOKEN), NOW, BOOT)
    assert found is not None
    assert (found.sequence, found.boottime, found.driver) == (7, 999.5, "a b")
    device = found.devices[bus(0)]
    assert (device.uuid, device.index, device.busy, device.memory_used) == ("GPU-1", 0, 12.5, 4096)
    account = found.tokens["feed"][bus(0)]
    assert (account.since, account.energy, account.used) == (990.0, 5.5, (500, 0, 0))
    assert account.covered == (1000, 1000, 0)


def test_what_is_not_observed_any_more_is_not_said_to_be_idle() -> None:
    text = f"{HEAD}looked=1000.0\ntoken feed {bus(0)} seen=990.0 idle=500.0\n"
    found = parse_sample(text, SAMPLE_LINE)
    assert [found.idle(bus(0), "feed", oldest) for oldest in (11.0, 9.0)] == [500.0, None]


@pytest.mark.parametrize(
    ("now", "boot", "fresh"),
    [
        (NOW + 9, BOOT, True),
        (NOW + 11, BOOT, False),
        (NOW - 100, BOOT, False),
        (NOW, OTHER_BOOT, False),
    ],
)
def test_only_a_fresh_sample_of_this_boot_is_taken(
    now: float, boot: str, fresh: bool, tmp_path: Path
) -> None:
    assert (read_sample(written(tmp_path, HEAD), now, boot) is not None) is fresh


def test_unknown_lines_keys_and_bad_values_are_passed_over() -> None:
    text = HEAD + "future thing=1\n=\n\ndevice\ndevice x\ntoken feed\ntoken ../../x a since=1\n"
    text += (
        f"device {bus(1)} busy=nan observed=-1 index=1e3 power=inf energy=5 new=7 word uuid=GPU-2"
        f" memory_total={'9' * 4000}\n"
    )
    found = parse_sample(text, SAMPLE_LINE)
    device = found.devices[bus(1)]
    values = (device.busy, device.observed, device.index, device.power, device.memory_total)
    assert values == (None,) * 5
    assert (device.energy, device.uuid, device.own) == (5.0, "GPU-2", {"new": "7", "word": ""})
    assert found.tokens == {}


@pytest.mark.parametrize("token", ["", "../sample", "a/b", "x" * 65, "a.b", "ä"])
def test_a_token_that_could_be_a_path_is_none(token: str, tmp_path: Path) -> None:
    (tmp_path / "finished/a").mkdir(parents=True)
    text = f"{FINISHED_LINE}\nboot_id={BOOT}\nboottime=999.5\n{TOKEN}"
    for name in ("sample", "finished/feed", "finished/a.b", "finished/a/b"):
        written(tmp_path, text, name)
    assert read_finished_claim(str(tmp_path), token) is None
    assert read_finished_claim(str(tmp_path), "feed") is not None
