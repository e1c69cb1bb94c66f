# SPDX-License-Identifier: Apache-2.0
"""Compare the map of Slurm's positions with gres.conf as it is now: a program of gpulockd's.

slurmd reads gres.conf when it starts. So another list than the map's counts once slurmd has
started after the change. A reconfigure before 23.11 keeps the process and cannot be seen
(docs/facts/slurm.md, slurmd and its programs).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from gpulock.errors import Refusal, one_line
from gpulock.install.files import InstallError, lock_installation
from gpulock.install.items import FileItem, Wanted
from gpulock.install.slurm import gres
from gpulock.install.slurm.site import find_slurm_site
from gpulock.node.settings_file import read_settings
from gpulock.slurm.gres_map import MAP_NAME, SHARED, map_positions, read_map_pairs

DONE, NOT_DONE = 0, 1
ASK: Final = "--ask"


def renew_gres_map(config: Path, ask: bool) -> str:
    """Bring the map in step; return what changed; raise InstallError or Refusal.

    With `ask` slurmd is asked even where gres.conf says what it said: the cards changed.
    """
    settings = read_settings(str(config))
    pairs = read_map_pairs(settings.state_dir)
    site = find_slurm_site(settings)
    source = gres.read_gres_source(site)
    places = [place for _, place in sorted(map_positions(pairs).items(), key=lambda p: int(p[0]))]
    shared = pairs.get(SHARED, "").split()
    known = (places, shared)
    same = source.meaning == pairs.get(gres.MEANING, "")
    if ask or not same:
        listed = gres.parse_gres_list(site.gres())
        if listed.positions or not places:
            places, shared = (
                gres.devices_of_positions(settings, listed.positions),
                list(listed.shared),
            )
        elif not same:  # else NVML was not to be loaded: gpulockd opens no device
            raise InstallError(f"{gres.NO_GRES}; {gres.LOOK_AT_LIST}")
    if (places, shared) != known and not gres.has_slurmd_read(site):
        raise InstallError(
            "slurmd has another list of GPUs in its files than in force, as far as is known:"
            " restart slurmd; or scontrol reconfigure, then gpulock install slurm"
        )
    text = gres.slurm_map_text(source, places, shared)
    item = FileItem(Path(settings.state_dir, MAP_NAME), text)
    if item.read() == text:
        return ""
    with lock_installation(Path(settings.state_dir)):
        item.write(Wanted.PRESENT)
    return f"{len(places)} positions of Slurm's list, as slurmd has them"


def main(argv: list[str]) -> int:
    """Renew the map of `[--ask] CONFIG`; print one line of what changed, or why it was not done."""
    *options, config = argv
    code = NOT_DONE
    try:
        said, code = renew_gres_map(Path(config), ASK in options), DONE
    except Refusal as refusal:
        said = f"{refusal.why}; {refusal.do}"
    except (InstallError, OSError) as fault:
        said = str(fault)
    sys.stdout.write(f"{one_line(said)}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
