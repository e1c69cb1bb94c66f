# SPDX-License-Identifier: Apache-2.0
"""What a hostile user of a real Slurm tried: each test says what, and what stopped it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.labs.common.device_nodes import opened
from tests.labs.sge.wait import until
from tests.labs.slurm.confined import EVERY, Site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import gate_file

pytestmark = [pytest.mark.lab, pytest.mark.attack]
USER = "slalice"
CONTROL = {"nvidiactl"}


@contextmanager
def login_file(gpus: Gpulock, text: str) -> Generator[None]:
    """Give the user a login file, which slurmd runs for `--get-user-env` and `--export=NAME`."""
    place = gpus.slurm.users[USER].home / ".bash_profile"
    place.write_text(text)
    try:
        yield
    finally:
        place.unlink()


# --- ISOLATION=cgroup: what runs as the user outside of the job's cgroup --------------------------


@pytest.mark.parametrize("asked", [["--gres=gpu:1"], []], ids=["gpu", "none"])
@pytest.mark.parametrize("words", [["--get-user-env"], ["--export=NONE"], ["--export=A=1"]])
def test_a_login_file_that_slurmd_runs_opens_no_gpu(
    site: Site, words: list[str], asked: list[str]
) -> None:
    """Tried: a child of the login file, in a session of its own, opens every GPU and stays.

    Stopped by: slurmd's own cgroup, to which the Prolog moved it, opens no GPU to a user.
    """
    seen, go = gate_file(site.gpus, "seen"), gate_file(site.gpus, "go")
    probe = (
        f"{site.probe} >{seen}.part; mv {seen}.part {seen}; until [ -e {go} ]; do sleep 0.1; done"
    )
    child = f"setsid sh -c '{probe}; {site.probe} >{go}.seen; echo over >>{go}.seen'"
    text = f"{child} </dev/null >/dev/null 2>&1 &\nuntil [ -e {seen} ]; do sleep 0.1; done\n"
    after = gate_file(site.gpus, "go.seen")
    with login_file(site.gpus, text):
        job = site.submit(*asked, *words, text="true\n")
        assert site.slurm.wait_done(job) == "COMPLETED"
    assert opened(seen.read_text()) == {"ENXIO": CONTROL, "EPERM": set(EVERY)}
    go.touch()  # the job is over, its child is not
    until(lambda: after.exists() and "over" in after.read_text(), what="the child to look again")
    assert opened(after.read_text()) == {"ENXIO": CONTROL, "EPERM": set(EVERY)}
    assert site.left() == []
