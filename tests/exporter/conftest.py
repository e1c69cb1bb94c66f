# SPDX-License-Identifier: Apache-2.0
"""What the tests of the server under load share."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.exporter.certificates import make_authority, make_certificate


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with a certificate `server.pem` beside it."""
    folder = tmp_path_factory.mktemp("certificates")
    made = make_authority(folder, "authority")
    make_certificate(folder, "server", made)
    return made


@pytest.fixture(scope="session", autouse=True)
def _many_sockets() -> None:  # pyright: ignore[reportUnusedFunction]
    """Over a thousand clients live in the test's own process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
