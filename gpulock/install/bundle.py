# SPDX-License-Identifier: Apache-2.0
"""Pack the hooks' library into the one file that `gpulock.bundle` loads."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from gpulock.bundle import NAME

# Run by the interpreter that will load it: byte code is of one version. Without docstrings, which
# nobody reads there: 0.2 ms.
_PACK: Final = """
import marshal, os, sys
from importlib.util import MAGIC_NUMBER
library, name = sys.argv[1:]
modules = {}
for top, _, files in os.walk(library + "/gpulock"):
    for file in files:
        path = top + "/" + file
        if not file.endswith(".py"):
            continue
        dotted = path[len(library) + 1 : -3].replace("/", ".")
        package = dotted.endswith(".__init__")
        code = compile(open(path, "rb").read(), path, "exec", dont_inherit=True, optimize=2)
        modules[dotted.removesuffix(".__init__")] = (package, marshal.dumps(code))
with open(library + "/." + name, "wb") as file:
    marshal.dump((MAGIC_NUMBER, modules), file)
os.chmod(file.name, 0o644)
os.rename(file.name, library + "/" + name)
"""


def pack_hook_bundle(library: Path, interpreter: str) -> None:
    """Write the bundle of what is in `library`; raise subprocess.SubprocessError or OSError."""
    subprocess.run(
        [interpreter, "-IS", "-c", _PACK, str(library), NAME],
        env={},
        check=True,
        timeout=60,
        capture_output=True,
    )
