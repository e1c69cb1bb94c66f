# SPDX-License-Identifier: Apache-2.0
"""The first job of docs/examples, as a user of each real scheduler submits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labs.both.site import Site

pytestmark = pytest.mark.lab
EXAMPLES = Path(__file__).parents[3] / "docs/examples"


def test_the_first_job_of_the_examples_says_which_two_gpus_it_has(
    site: Site, scheduler: str
) -> None:
    script = EXAMPLES / scheduler.lower().replace(" ", "-") / "job.sh"
    job = site.submit(0, script.read_text().partition("\n")[2])  # its own lines ask for GPUs
    said = site.wait_said(job, " has GPUs ")
    assert f"job {job} has GPUs 0,1 of " in said
    site.wait_over(job)
    assert site.locks() == {}
