# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command line share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_site import Site
from tests.support.samples import Sampled


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Give a simulated DGX-1."""
    return Site(tmp_path)


@pytest.fixture
def sampled(site: Site, up_for_a_day: None) -> Sampled:
    """Give the exporter's sample of that node, to be written."""
    return Sampled(site.files.exporter_dir)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that leads a session."""
    with subprocess.Popen(["/bin/sleep", "300"], start_new_session=True) as started:
        yield started
        started.kill()
