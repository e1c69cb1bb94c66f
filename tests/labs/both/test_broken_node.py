# SPDX-License-Identifier: Apache-2.0
"""What takes a node out of service, and what does not."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import SHOW, Site
from tests.labs.common.installed import mounted

pytestmark = pytest.mark.lab


@contextlib.contextmanager
def without(file: Path) -> Generator[None]:
    """Let a file or a folder of the simulated driver not be there."""
    gone = file.parents[1] / f"gone-{file.name}"
    file.rename(gone)
    try:
        yield
    finally:
        gone.rename(file)


@pytest.mark.short
@EVERY
def test_a_node_without_a_driver_goes_out_of_service_and_its_job_runs_once_it_is_repaired(
    site: Site,
) -> None:
    """A job without GPUs runs on it masked, and stops nothing."""
    with without(site.gpus.drivers / site.node / "proc/driver/nvidia"):
        masked = site.submit(0, SHOW)
        site.wait_over(masked)
        assert site.said(masked) == "mask=.\n"
        assert site.in_service()
        job = site.submit(1, SHOW)
        why = site.wait_stopped(job)
        assert "broken: " in why and "no NVIDIA driver" in why
        assert "mask" not in site.said(job)
        assert site.locks() == {}
        claims = site.gpus.cluster.path_in(site.node, "/run/gpulock.claims/claims")
        assert not claims.exists() or list(claims.iterdir()) == []
    site.put_in_service()
    site.begin_held(job)
    site.wait_over(job)
    assert "mask=0.\n" in site.said(job)


@EVERY
def test_a_lock_dir_that_fills_up_lets_each_job_give_back_and_stops_no_node(site: Site) -> None:
    """Users can fill /run where a program gives them a folder there; a release needs no room."""
    with mounted(
        site.gpus, site.node, "/run/gpulock", "-t", "tmpfs", "-o", "mode=755,size=512k", "small"
    ):
        job = site.start(1)
        line = ["dd", "if=/dev/zero", "of=/run/gpulock/fill", "bs=4k"]
        assert "No space left" in site.gpus.cluster.run_in(site.node, line).stderr
        assert "LOCK_DIR it is full" in " ".join(site.command("status").split())
        late = site.submit(1, "echo ran\n")
        assert "ran\n" not in site.wait_sent_back(late)
        assert site.in_service()
        site.end(job, late)
        assert site.locks() == {}
