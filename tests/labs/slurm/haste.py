# SPDX-License-Identifier: Apache-2.0
"""A slurmctld that looks for what is to be done ten times a second, not once.

Its main loop sleeps ten times for a tenth of a second (22.05, `_slurmctld_background`), and starts
no batch job but there: a test would wait for that, and for nothing else, most of its time.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = """
#include <time.h>
#include <unistd.h>

int usleep(useconds_t useconds)
{
    struct timespec rest = {0, 0};
    if (useconds == 100000)
        useconds = 10000;
    rest.tv_sec = useconds / 1000000;
    rest.tv_nsec = useconds % 1000000 * 1000L;
    return nanosleep(&rest, 0);
}
"""


def environ(lab: Path) -> dict[str, str]:
    """Return the environment in which slurmctld hastes; what it takes is made in `lab`, once."""
    made = lab / "haste.so"
    if not made.exists():
        source = lab / "haste.c"
        source.write_text(_SOURCE)
        build = ["gcc", "-shared", "-fPIC", "-o", str(made), str(source)]
        subprocess.run(build, check=True, timeout=60)
    return {"LD_PRELOAD": str(made)}
