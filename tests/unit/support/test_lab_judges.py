# SPDX-License-Identifier: Apache-2.0
"""The labs' judges see what they are to see: a planted double grant, a device that is free."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpulock.store import owner
from gpulock.store.owner import Owner
from tests.labs.common.journal import Hold, complaints
from tests.labs.daemon.daemon_witness import Witness, claims_of

DEVICE = "0000:06:00.0"


def test_each_way_to_harm_a_job_is_told() -> None:
    first = Hold(0, "n", ("a", "b"), 1.0, 2.0)
    well = [first, Hold(1, "n", ("a",), 2.5, 3.0), Hold(2, "n", ("b",), 2.6, 3.0)]
    assert complaints({0: 2, 1: 1, 2: 1}, well) == []
    ill = [first, Hold(1, "n", ("a",), 1.5, 3.0), Hold(2, "n", ("c",), 4.0)]
    assert complaints({0: 2, 1: 2, 2: 1, 3: 1}, ill) == [
        "job 3 never ran",
        "job 1 asked for 2 and saw ('a',)",
        "job 2 was cut short",
        "n a: jobs 0 and 1",
    ]


def test_a_device_that_is_free_while_a_process_lives_is_told(tmp_path: Path) -> None:
    words = {"scheduler": "sge", "node": "n1", "boot_id": "b", "job_id": "7", "token": "aa"}
    (tmp_path / DEVICE).mkdir()
    record = owner.encode_owner(Owner(devices=(DEVICE,), **words))
    (tmp_path / DEVICE / "owner").write_text(record)
    (claim,) = claims_of(tmp_path, 7)
    with subprocess.Popen(["sleep", "600"]) as process:
        free = pytest.raises(AssertionError, match=f"while \\[{process.pid}\\] live")
        with free, Witness(claim, [process.pid]):
            shutil.rmtree(tmp_path / DEVICE)
        process.kill()
