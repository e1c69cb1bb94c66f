# SPDX-License-Identifier: Apache-2.0
"""Render the hooks with all they need into one folder of this node's own disk.

Hooks are no scripts of the package (pip would drop `-IS` from one): interpreter, library path and
settings file are written into them here. A folder holds hooks and library of one version, so a
hook that runs while the next version is installed never mixes the two.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import gpulock
from gpulock.install import drop_env
from gpulock.install.files import InstallError, find_share_folder, make_public_folder, run_program
from gpulock.install.hook_script import HOOKS, preload_name, render_python_hook
from gpulock.node.settings import parse_settings
from gpulock.store import atomic

SHEPHERD: Final = "sge_shepherd"
# what the package has of `prolog` beside the Python hooks
SHELL: Final = ("sge-starter", SHEPHERD)
# hooks of enroot and podman, to which an administrator links (docs/containers.md)
PODMAN_PROGRAM: Final = "podman/gpulock_mask.py"
CONTAINERS: Final = ("enroot/97-gpulock.sh", "podman/97-gpulock.json", PODMAN_PROGRAM)
# packages; gpulock/*.py is hot as well
HOT: Final = ("store", "node", "job", "alloc", "hooks", "isolation", "slurm", "sge")
SYSTEM_PYTHON: Final = "/usr/bin/python3"
# One compiled file a hook, with all that it imports: a fifth less than thirty files take. It is an
# ordinary `.pyc`, loaded by `import`, whose code makes each module from the code of its own source.
# So a traceback shows the sources. It is compiled by the interpreter that will load it.
_MODULES: Final = """\
import sys
for name, path, package, code in "MODULES":
    module = sys.modules[name] = type(sys)(name)
    module.__file__ = path
    if package:
        module.__path__ = [package]
    above, _, own = name.rpartition(".")
    if above:
        setattr(sys.modules[above], own, module)
    exec(code, module.__dict__)
"""
# The library is compiled first. Importing a module of a hook tells what it needs, in the order in
# which imports end. Docstrings and types of arguments are left out, which nobody reads: 0.6 ms. A
# header of zeros says that no source is compared.
_PACK: Final = """
import ast, compileall, importlib, marshal, os, py_compile, sys
from importlib import machinery, util
library, text, *hooks = sys.argv[1:]
unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
if not compileall.compile_dir(library, quiet=1, invalidation_mode=unchecked):
    sys.exit("see above")
sys.path.insert(0, library)
run, order = machinery.SourceFileLoader.exec_module, []
def exec_module(loader, module):
    run(loader, module)
    order.append(module)
machinery.SourceFileLoader.exec_module = exec_module
for hook in hooks:
    for known in [known for known in sys.modules if known.partition(".")[0] == "gpulock"]:
        del sys.modules[known]
    order.clear()
    module, _, name = hook.partition("=")
    importlib.import_module(module)
    rows = []
    for one in [one for one in order if one.__name__.partition(".")[0] == "gpulock"]:
        with open(one.__file__, "rb") as file:
            tree = ast.parse(file.read())
        for part in ast.walk(tree):
            if isinstance(part, ast.arg):
                part.annotation = None
            elif isinstance(part, ast.FunctionDef):
                part.returns = None
        code = compile(tree, one.__file__, "exec", dont_inherit=True, optimize=2)
        rows.append((one.__name__, one.__file__, [*getattr(one, "__path__", [""])][0], code))
    code = compile(text, name, "exec", dont_inherit=True)
    consts = [tuple(rows) if const == "MODULES" else const for const in code.co_consts]
    path = f"{library}/{name}.pyc"
    with open(f"{path}.new", "wb") as file:
        packed = marshal.dumps(code.replace(co_consts=tuple(consts)))
        file.write(util.MAGIC_NUMBER + bytes(12) + packed)
    os.rename(file.name, path)
"""


class HookPaths:
    """The rendered hooks below one folder, and their library."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drop_env = folder / "prolog" / drop_env.DROP_ENV  # starts a hook of Grid Engine
        self.prolog = folder / "prolog/sge"
        self.epilog = folder / "epilog/sge"
        self.sensor = folder / "prolog/sge-sensor"
        self.slurm_prolog = folder / "prolog/slurm"
        self.slurm_task = folder / "prolog/slurm-task"
        self.slurm_epilog = folder / "epilog/slurm"
        self.library = folder / "lib"  # what stands on the hooks' module path


def hook_modules() -> dict[str, bytes]:
    """Return every module a hook can import, by its path below `lib`."""
    package = Path(gpulock.__file__).resolve().parent
    folders = [package, *(package / name for name in HOT if (package / name).is_dir())]
    return {
        str(path.relative_to(package.parent)): path.read_bytes()
        for folder in folders
        for path in sorted(folder.glob("*.py"))
    }


def read_site_shepherd(config: Path) -> str:
    """Return SGE_SHEPHERD of the settings, nothing where they cannot be read (doctor says so)."""
    try:
        return parse_settings(config.read_text(), str(config)).sge_shepherd
    except (OSError, ValueError):
        return ""


def hooks_python() -> str:
    """Return the interpreter of the hooks: the real file of this one, for an environment may go.

    The distribution's own python3 has the name that its upgrades keep: `python3.11` goes with them.
    """
    real = os.path.realpath(sys.executable)
    return SYSTEM_PYTHON if real == os.path.realpath(SYSTEM_PYTHON) else real


def hook_folder_files(folder: Path, config: Path) -> dict[str, bytes]:
    """Return every file of a folder of hooks by its path, but for the byte code.

    Interpreter, library, settings and shepherd are in the scripts. Without drop-env where it cannot
    be had: Slurm's need none.
    """
    words = (hooks_python(), str(folder / "lib"), str(config.absolute()))
    scripts = {name: render_python_hook(name, *words) for name in HOOKS}
    share = find_share_folder() / "prolog"
    scripts |= {f"prolog/{name}": (share / name).read_text() for name in SHELL}
    if shepherd := read_site_shepherd(config):
        name, given = f"prolog/{SHEPHERD}", f"SHEPHERD={shlex.quote(shepherd)}"
        scripts[name] = re.sub(r"(?m)^SHEPHERD=.*", lambda _: given, scripts[name])
    scripts |= {name: (share / name).read_text() for name in CONTAINERS}
    _, _, code = scripts[PODMAN_PROGRAM].partition("\n")
    scripts[PODMAN_PROGRAM] = f"#!{hooks_python()} -IS\n{code}"
    files = {name: text.encode() for name, text in scripts.items()}
    files |= {f"lib/{name}": data for name, data in hook_modules().items()}
    with suppress(InstallError):
        files[f"prolog/{drop_env.DROP_ENV}"] = drop_env.drop_env_program()
    return files


def hooks_version(config: Path) -> str:
    """Return the name of the folder that this package would install for a settings file."""
    seen = hashlib.sha256(sys.version.encode())
    for name, data in hook_folder_files(Path("/"), config).items():
        seen.update(name.encode() + b"\0" + data + b"\0")
    return f"{gpulock.__version__}-{seen.hexdigest()[:12]}"


def render_hooks(target: Path, config: Path) -> HookPaths:
    """Write hooks and library for `config` into the folder `target`; raise InstallError.

    Needs no root: the folder belongs to the caller, readable by everybody, writable by nobody
    else. What is there already is replaced file by file, and what does not belong is removed.
    """
    folder = target.absolute()
    files = hook_folder_files(folder, config)
    try:
        for name, data in files.items():
            path = folder / name
            make_public_folder(path.parent)
            mode = 0o644 if name.startswith("lib/") else 0o755
            atomic.replace_file(str(path), data, mode)
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_file() and str(path.relative_to(folder)) not in files:
                os.unlink(path)
        _compile_library(hooks_python(), folder / "lib")
    except OSError as fault:
        raise InstallError(f"hooks cannot be written: {fault}; see {target}") from fault
    return HookPaths(folder)


def _compile_library(interpreter: str, library: Path) -> None:
    """Compile the library by the interpreter that will run it, and one file for each hook.

    Unchecked: the folder never changes once it is installed, and a hook saves the comparison.
    """
    words = [f"gpulock.{module}={preload_name(module)}" for _, module, _ in HOOKS.values()]
    options = ("-IS", "-X", "no_debug_ranges", "-c", _PACK)
    command = [interpreter, *options, str(library), _MODULES, *words]
    done = run_program(command, 120, {}, umask=0o022)
    if done.returncode != 0:
        why = (done.stdout + done.stderr).strip()
        raise InstallError(f"{interpreter} cannot compile the hooks: {why[-300:]}")
