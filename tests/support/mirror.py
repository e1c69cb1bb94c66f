# SPDX-License-Identifier: Apache-2.0
"""The archive from which a Debian root of another release is made: this machine's own of Debian.

Run as a program it prints it. What lies beside it among the sources of apt is no such archive: that
of -security, backports, other programs' own. It is told by the names in its Release file, as apt
knows them once it has read that, in whatever form the sources are written.
"""

from __future__ import annotations

import subprocess

DEFAULT = "http://deb.debian.org/debian/"
_FORMAT = "$(ORIGIN)|$(LABEL)|$(REPO_URI)"


def choose_mirror(told: str) -> str:
    """Return the archive by lines of ORIGIN|LABEL|URL; Debian's own where there is none; pure."""
    for line in told.splitlines():
        origin, label, url = line.split("|", 2)
        if origin == label == "Debian" and not url.startswith("cdrom:"):
            return url
    return DEFAULT


def ask_for_mirror() -> str:
    """Return the archive that this machine's own packages come from."""
    command = ["apt-get", "indextargets", "--format", _FORMAT]
    return choose_mirror(subprocess.check_output(command, text=True))


if __name__ == "__main__":
    print(ask_for_mirror())
