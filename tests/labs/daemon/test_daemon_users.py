# SPDX-License-Identifier: Apache-2.0
"""A shared workstation without a scheduler: gpulockd serves real users through its socket."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.labs.daemon.daemon_site import CHECKOUT
from tests.support.scene import folder

SOAK = os.environ.get("GPULOCK_SOAK") == "1"
pytestmark = [pytest.mark.lab, pytest.mark.timeout(7200 if SOAK else 600)]
ROUNDS = 100 if SOAK else 2
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def told(story: str, number: int = 1) -> str:
    """Tell a story in a pid namespace of its own; return what it printed."""
    with folder("users") as root:
        argv = [*ALONE, sys.executable, "-m", "tests.labs.daemon.daemon_users", story, str(root)]
        done = subprocess.run(
            [*argv, str(number)],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_users_killed_at_random_never_share_a_device_and_lose_none() -> None:
    told("crowd", ROUNDS)


def test_nobody_claims_or_releases_as_another() -> None:
    told("rights")


def test_a_claim_follows_a_docker_container_that_has_its_user_and_token() -> None:
    told("docker")


@pytest.mark.attack
def test_an_honest_user_is_served_beside_a_hostile_one() -> None:
    """Tried: calls that wait for ever, stopped, silent or many, and reserves of every GPU.

    Stopped by: the queue's turns and limits, and RESERVE_MAX; each honest wait is printed.
    """
    told("hostile")
