# SPDX-License-Identifier: Apache-2.0
"""Write what completes `gpulock` in a shell: `python packaging/completion.py FOLDER`.

Where bash, zsh and fish look below /usr/share. What they complete they ask the program itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from click.shell_completion import get_completion_class

from gpulock.cli import command_group

PLACES: Final = {
    "bash": "bash-completion/completions/gpulock",
    "zsh": "zsh/site-functions/_gpulock",
    "fish": "fish/vendor_completions.d/gpulock.fish",
}


def write_completions(folder: Path) -> list[Path]:
    """Write the files below FOLDER, which stands for /usr/share; return their paths."""
    found: list[Path] = []
    for shell, place in PLACES.items():
        kind = get_completion_class(shell)
        assert kind is not None
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kind(command_group, {}, "gpulock", "_GPULOCK_COMPLETE").source())
        found.append(path)
    return found


if __name__ == "__main__":
    for one in write_completions(Path(sys.argv[1])):
        print(one)
