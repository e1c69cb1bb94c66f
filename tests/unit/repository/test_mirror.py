# SPDX-License-Identifier: Apache-2.0
"""A Debian root is made from the archive of Debian, whatever else apt knows."""

from __future__ import annotations

import pytest

from tests.support.mirror import choose_mirror

OWN = "Debian|Debian|http://mirror.example.org/some/debian/"
SECURITY = "Debian|Debian-Security|http://debian.example.org/debian-security/"
UNMARKED = "Debian|Debian-Security|http://mirror.example.org/updates/"
BACKPORTS = "Debian Backports|Debian Backports|http://debian.example.org/backports/"
OTHERS = ". nodistro|. nodistro|https://other.example.org/node_20.x/"
NAMELESS = "$(ORIGIN)|$(LABEL)|https://packages.example.org/apt/"
UBUNTU = "Ubuntu|Ubuntu|http://ubuntu.example.org/ubuntu/"
DISC = "Debian|Debian|cdrom://[Debian GNU/Linux 12]/"


@pytest.mark.parametrize(
    ("lines", "chosen"),
    [
        ((OWN, SECURITY), "http://mirror.example.org/some/debian/"),
        ((SECURITY, UNMARKED, OTHERS, OWN), "http://mirror.example.org/some/debian/"),
        ((NAMELESS, BACKPORTS, DISC, OWN), "http://mirror.example.org/some/debian/"),
        (
            (OWN, "Debian|Debian|http://second.example.org/"),
            "http://mirror.example.org/some/debian/",
        ),
        ((UBUNTU, SECURITY), ""),
        (("Debian|Debian|http://a.example.org/x|y/",), "http://a.example.org/x|y/"),
        ((), ""),
    ],
)
def test_the_archive_is_chosen_by_its_names(lines: tuple[str, ...], chosen: str) -> None:
    assert choose_mirror("".join(f"{line}\n" for line in lines)) == chosen
