# SPDX-License-Identifier: Apache-2.0
"""Whether Docker takes the names by which a job's GPUs are called."""

from __future__ import annotations

import pytest

from gpulock.install.docker import Release, takes_cdi_names
from gpulock.install.hooks import InstallError


@pytest.mark.parametrize(
    ("text", "release", "folder", "taken"),
    [
        ("", (28, 1), "/var/run/cdi", False),
        ("", (28, 2), "/var/run/cdi", True),
        ("", (29, 0), "/run/cdi/", True),
        ("", (29, 0), "/srv/cdi", False),
        ("", None, "/etc/cdi", False),
        ('{"features": {"cdi": true}}', None, "/etc/cdi", True),
        ('{"features": {"cdi": true}}', (20, 10), "/etc/cdi", False),
        ('{"features": {"cdi": false}}', (29, 0), "/etc/cdi", False),
        ('{"features": null}', (29, 0), "/etc/cdi", True),
        ('\ufeff{"features": {"cdi": true}}', (26, 1), "/etc/cdi", True),
        ('{"cdi-spec-dirs": ["/etc/cdi"]}', (29, 0), "/var/run/cdi", False),
        ('{"cdi-spec-dirs": ["/run/cdi"]}', (29, 0), "/var/run/cdi", True),
        ('{"cdi-spec-dirs": [""]}', (29, 0), "/etc/cdi", False),
    ],
)
def test_docker_takes_the_names_of_a_folder(
    text: str, release: Release | None, folder: str, taken: bool
) -> None:
    assert takes_cdi_names(text, release, folder) is taken


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"features": []}', '{"cdi-spec-dirs": "/etc/cdi"}', "1"]
)
def test_what_docker_would_not_read_is_a_fault(text: str) -> None:
    with pytest.raises(InstallError, match=r"daemon\.json"):
        takes_cdi_names(text, (29, 0), "/var/run/cdi")
