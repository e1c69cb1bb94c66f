# SPDX-License-Identifier: Apache-2.0
"""The Python hooks: one script, rendered with the module that a hook starts and how it is called.

Standard library only: `prolog/hook` renders it in a checkout, without any site-packages.
"""

from __future__ import annotations

from typing import Final

# By path below the folder of the hooks: title, module, arguments of its `main`.
HOOKS: Final = {
    "prolog/sge": ("Prolog of Grid Engine", "sge.prolog", "sys.argv, os.environ, CONFIG"),
    "epilog/sge": ("Epilog of Grid Engine", "sge.epilog", "sys.argv, os.environ, CONFIG"),
    "prolog/sge-slave": ("Slave tasks of Grid Engine", "sge.slave", "sys.argv, os.environ, CONFIG"),
    "prolog/sge-sensor": ("Load sensor of Grid Engine", "sge.sensor", "os.environ, CONFIG"),
    "prolog/slurm": ("Prolog of Slurm", "slurm.prolog", "os.environ, CONFIG"),
    "epilog/slurm": ("Epilog of Slurm", "slurm.epilog", "os.environ, CONFIG"),
    "prolog/slurm-session": ("PAM session of a Slurm step", "slurm.session", "os.environ, CONFIG"),
    "prolog/slurm-task": ("TaskProlog of Slurm", "slurm.task", "os.environ, CONFIG"),
}
LASTING: Final = "prolog/sge-sensor"  # it runs for days, and prints
_BRIEF: Final = "gc.disable()  # a hook is over before a cycle would matter: 0.5 ms\n"
_SCRIPT: Final = '''\
#!{interpreter} -IS
# SPDX-License-Identifier: Apache-2.0
"""{title}; rendered from gpulock/install/hook_script.py."""

import gc
import sys

{brief}CONFIG = {config!r}
sys.path[:0] = [{library!r}]

try:
    import {preload}
except (ImportError, EOFError, ValueError, TypeError):
    pass  # missing, cut short or of another Python: each module loads from its own file

import os

from gpulock.{module} import main

if __name__ == "__main__":
    {leave}(main({words}))
'''


def preload_name(module: str) -> str:
    """Return the name of the file with all that a hook imports (gpulock.install.hooks)."""
    return f"gpulock_{module.replace('.', '_')}"


def render_python_hook(name: str, interpreter: str, library: str, config: str) -> str:
    """Return the script of one of `HOOKS`.

    One that is over at once leaves by os._exit: nothing is buffered, 2 ms less than sys.exit.
    """
    title, module, words = HOOKS[name]
    lasting = name == LASTING
    return _SCRIPT.format(
        interpreter=interpreter,
        title=title,
        brief="" if lasting else _BRIEF,
        library=library,
        config=config,
        preload=preload_name(module),
        module=module,
        leave="sys.exit" if lasting else "os._exit",
        words=words,
    )
