# SPDX-License-Identifier: Apache-2.0
"""A next command leads to the node that was looked at: it has the --config that was given."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence

import pytest

from gpulock.cli.commands import NAMES
from gpulock.store.events import REFUSED, note_event
from tests.support.cli_site import Site

COMMAND = re.compile(rf"\bgpulock (?:--config \S+ )?(?:{'|'.join(NAMES)})\b")
Scene = Callable[[Site], object]


def break_record(site: Site) -> None:
    site.hold(3)
    site.spoil(3)


def lose_records(site: Site) -> None:
    site.hold(3)
    shutil.rmtree(f"{site.files.lock_dir}.claims")


def quarantine_and_reserve(site: Site) -> None:
    site.call("reserve", "3", "--reason", "test")
    site.call("quarantine", "3", "--reason", "test")


def refuse_job(site: Site) -> None:
    folder = site.node().store.path
    note_event(folder, REFUSED, "77", "gpulock: job 77: busy; see gpulock why 3")


SCENES: list[tuple[Scene, Sequence[str]]] = [
    (quarantine_and_reserve, ("status",)),
    (quarantine_and_reserve, ("why", "3")),
    (break_record, ("reap",)),
    (lose_records, ("reserve", "3", "--reason", "test")),
    (refuse_job, ("why", "77")),
    (lambda site: site.hold(3, job_id="3"), ("why", "3")),
    (lambda site: site.hold(3), ("reserve", "3", "--reason", "test")),
    (lambda site: None, ("why", "0")),
]


@pytest.mark.parametrize(("scene", "words"), SCENES)
def test_every_next_command_has_the_config_that_was_given(
    site: Site, scene: Scene, words: Sequence[str]
) -> None:
    scene(site)
    done = site.call(*words)
    told = COMMAND.findall(" ".join(f"{done.stdout} {done.stderr}".split()))
    assert told
    assert [one for one in told if not one.startswith(site.gpulock)] == []
