# SPDX-License-Identifier: Apache-2.0
"""What takes a node out of service, and what does not: the node's own faults, and its settings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import SHOW, Site
from tests.labs.common.installed import Installed, mounted, totals
from tests.labs.common.node_faults import (
    fill,
    with_a_full_lock_dir,
    with_a_full_state_dir,
    with_a_read_only_lock_dir,
    with_a_read_only_state_dir,
    with_a_users_lock_dir,
    without_a_card,
    without_driver,
)

pytestmark = pytest.mark.lab
RAN = "echo ran\n"
LOST = "the records of this boot's claims were lost"


Breaker = Callable[[Installed, str], contextlib.AbstractContextManager[None]]
BROKEN: Mapping[Breaker, str] = {
    without_driver: "no NVIDIA driver",
    without_a_card: "{count} GPUs asked for, {rest} of {count} work",
    with_a_users_lock_dir: "LOCK_DIR /run/gpulock has uid 27012",
    with_a_read_only_lock_dir: "Read-only file system",
    with_a_read_only_state_dir: "Read-only file system",
}


@pytest.mark.parametrize("breaker", BROKEN)
def test_a_broken_node_goes_out_of_service_with_our_reason_and_the_job_waits(
    site: Site, breaker: Breaker
) -> None:
    with breaker(site.gpus, site.node):
        job = site.submit(site.count, RAN)
        why = site.wait_stopped(job)
        assert "broken: " in why
        assert BROKEN[breaker].format(count=site.count, rest=site.count - 1) in why
        assert "ran\n" not in site.said(job)
        assert site.locks() == {}
        site.end(job)
    claims = site.gpus.cluster.path_in(site.node, "/run/gpulock.claims/claims")
    assert not claims.exists() or list(claims.iterdir()) == []


def test_a_card_that_fell_off_is_the_nodes_fault_only_when_it_is_needed(site: Site) -> None:
    with without_a_card(site.gpus, site.node):
        job = site.submit(site.count - 1, SHOW)
        site.wait_over(job)
        assert site.said(job) == f"mask={','.join(map(str, range(site.count - 1)))}.\n"
        assert site.in_service()


@pytest.mark.parametrize("breaker", [*BROKEN, with_a_full_lock_dir])
def test_a_job_without_gpus_runs_masked_on_a_broken_node(site: Site, breaker: Breaker) -> None:
    with breaker(site.gpus, site.node):
        job = site.submit(0, SHOW)
        site.wait_over(job)
        assert site.said(job) == "mask=.\n"
        assert site.in_service()


@pytest.mark.short
@EVERY
def test_a_job_that_met_a_broken_node_runs_once_it_is_repaired(site: Site) -> None:
    with without_driver(site.gpus, site.node):
        job = site.submit(1, SHOW)
        site.wait_stopped(job)
    site.put_in_service()
    site.begin_held(job)
    site.wait_over(job)
    assert "mask=0.\n" in site.said(job)


# --- what lasts for a while -----------------------------------------------------------------------


@EVERY
def test_a_full_lock_dir_stops_no_node_and_the_job_waits(site: Site) -> None:
    """Users can fill /run where a program gives them a folder there."""
    with with_a_full_lock_dir(site.gpus, site.node):
        job = site.submit(1, RAN)
        assert "ran\n" not in site.wait_sent_back(job)
        assert site.in_service()
        assert site.locks() == {}
        site.end(job)


@EVERY
def test_a_lock_dir_that_fills_up_lets_each_job_give_back(site: Site) -> None:
    """A release is one rename: it needs no room."""
    with mounted(
        site.gpus, site.node, "/run/gpulock", "-t", "tmpfs", "-o", "mode=755,size=512k", "small"
    ):
        job = site.start(1)
        fill(site.gpus, site.node, "/run/gpulock")
        assert "LOCK_DIR it is full" in " ".join(site.command("status").split())
        site.end(job)
        assert site.locks() == {}


@EVERY
def test_a_full_state_dir_fails_no_job_and_stops_no_node(site: Site) -> None:
    site.wait_over(site.submit(1, SHOW))
    with with_a_full_state_dir(site.gpus, site.node):
        for _ in range(2):
            job = site.submit(1, SHOW)
            site.wait_over(job)
            assert "mask=0.\n" in site.said(job)
        assert site.in_service()
    assert site.locks() == {}


@EVERY
def test_unknown_for_jobs_of_two_owners_in_a_row_is_a_broken_node(site: Site) -> None:
    site.wait_over(site.submit(1, SHOW))
    site.lose_claims()
    for _ in range(3):
        job = site.submit(1, RAN)
        assert f"unknown: {LOST}" in site.wait_sent_back(job)
        assert site.in_service()
        site.end(job)  # else it would meet the node once more
    last = site.submit(1, RAN, user=site.bob)
    why = site.wait_stopped(last)
    assert f"broken: {LOST}" in why
    assert "(for several jobs in a row)" in why
    counted = totals(site.gpus, site.node)
    assert int(counted["claims_unknown"]) >= 3 and counted["claims_broken"] == "1"


# --- settings -------------------------------------------------------------------------------------


@EVERY
def test_settings_that_cannot_be_believed_stop_no_node(site: Site) -> None:
    """Pushed to a cluster, each of them stopped node after node by one waiting job."""
    (site.state_dir / "settings.obeyed").unlink(missing_ok=True)
    with site.settings_file.open("a") as file:
        file.write("GUPS\n")
    job = site.submit(1, RAN)
    said = site.wait_sent_back(job)
    assert "not KEY=VALUE: 'GUPS'" in said and "ran\n" not in said
    assert site.in_service()
    assert site.locks() == {}


@EVERY
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("GUPS=4", "unknown key 'GUPS'"),
        ("GUPS", "not KEY=VALUE: 'GUPS': the settings obeyed last stay in force"),
        ("SLURM_WAIT=soon", "the settings obeyed last stay in force"),
        ("DRIVER_DIR=/opt # kept", "DRIVER_DIR must have no comment behind it"),
        ("DRIVER_DIR=/opt\0", "DRIVER_DIR must have printable characters only"),
        ("mode", ""),
        ("owner", ""),
    ],
)
def test_settings_with_a_fault_stop_no_job_where_they_were_obeyed_before(
    site: Site, line: str, fault: str
) -> None:
    before = site.start(1)
    with spoiled(site, line):
        after = site.submit(1, SHOW)

        site.wait_over(after)
        assert site.said(after) == "mask=1.\n"
        assert len(site.held(before)) == 1
        site.end(before)
        assert site.locks() == {}
        assert site.in_service()
        if fault:
            assert fault in " ".join(site.command("status").split())
            doctor = site.gpus.command(site.node, "doctor").stdout
            assert fault in doctor and "correct the file" in doctor


@contextlib.contextmanager
def spoiled(site: Site, how: str) -> Generator[None]:
    """Let the settings be a file that others may write, another user's, or have a line more."""
    place = site.settings_file
    text = place.read_text()
    if how == "mode":
        place.chmod(0o664)
    elif how == "owner":
        os.chown(place, 27001, 27001)
    else:
        place.write_text(f"{text}{how}\n")
    try:
        yield
    finally:
        os.chown(place, 0, 0)
        place.chmod(0o644)
        place.write_text(text)
