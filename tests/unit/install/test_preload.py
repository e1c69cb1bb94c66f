# SPDX-License-Identifier: Apache-2.0
"""An installed hook loads its modules from one compiled file, and from their own without it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.install.files import InstallError
from gpulock.install.hook_script import HOOKS, preload_name
from gpulock.install.hooks import HookPaths, render_hooks
from gpulock.simulate.node import write_simulated_node

pytestmark = pytest.mark.slow

REPORT = """    import json
    ours = {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "gpulock"}
    alone = sorted(name for name, one in ours.items() if one.__spec__)
    os.write(1, json.dumps({"ours": sorted(ours), "alone": alone, **more}).encode())
    os._exit(0)
"""
PROLOG = "gpulock.sge.prolog"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> HookPaths:
    root = tmp_path_factory.mktemp("preload")
    return render_hooks(root / "hooks", write_simulated_node(root / "node", "workstation").config)


@pytest.fixture
def preload(rendered: HookPaths) -> Iterator[Path]:
    """Give the file of the prolog of Grid Engine, and put it back."""
    path = rendered.library / f"{preload_name('sge.prolog')}.pyc"
    whole = path.read_bytes()
    yield path
    path.write_bytes(whole)


def loaded(hooks: HookPaths, name: str = "prolog/sge", extra: str = "more = {}") -> dict[str, Any]:
    """Run a hook up to the call of its main, then `extra`; return its modules, and `more`.

    Those that were loaded `alone`, from a file of their own, have a spec.
    """
    text = (hooks.folder / name).read_text()
    head, main, _ = text.partition('if __name__ == "__main__":\n')
    script = hooks.folder / "variant"
    script.write_text(f"{head}{main}    {extra}\n{REPORT}")
    done = subprocess.run(
        [sys.executable, "-IS", str(script)], capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", HOOKS)
def test_an_installed_hook_loads_no_module_from_a_file_of_its_own(
    rendered: HookPaths, name: str
) -> None:
    modules = loaded(rendered, name)

    assert f"gpulock.{HOOKS[name][1]}" in modules["ours"]
    assert modules["alone"] == []


def test_a_module_that_is_needed_later_loads_from_its_file(rendered: HookPaths) -> None:
    alone = loaded(rendered, extra="import gpulock.alloc.reaper; more = {}")["alone"]
    assert "gpulock.alloc.reaper" in alone and PROLOG not in alone


def test_tracebacks_and_debuggers_show_the_sources(rendered: HookPaths) -> None:
    more = (
        "import inspect, linecache, traceback\n"
        "    try:\n        main(None, None, None)\n"
        "    except BaseException:\n        trace = traceback.format_exc()\n"
        "    more = {'trace': trace, 'source': inspect.getsource(main)}"
    )

    shown = loaded(rendered, extra=more)
    assert f'File "{rendered.library}/gpulock/sge/prolog.py", line ' in shown["trace"]
    line = shown["trace"].partition("in main\n    ")[2].partition("\n")[0]
    assert line and line in (rendered.library / "gpulock/sge/prolog.py").read_text()
    assert shown["source"].startswith("def main(")


def cut(data: bytes) -> bytes:
    """Return a file without its end."""
    return data[:1000]


def cut_head(data: bytes) -> bytes:
    """Return a file without most of its head."""
    return data[:10]


def of_another_python(data: bytes) -> bytes:
    """Return the file of another interpreter, whose code this one cannot run."""
    assert data.startswith(importlib.util.MAGIC_NUMBER)
    return b"\xff\xff\r\n" + data[4:]


def empty(data: bytes) -> bytes:
    """Return nothing: a disk was full."""
    return data[:0]


@pytest.mark.parametrize("harm", [cut, cut_head, of_another_python, empty, None])
def test_a_hook_does_without_a_file_that_is_of_no_use_or_gone(
    rendered: HookPaths, preload: Path, harm: Callable[[bytes], bytes] | None
) -> None:
    if harm:
        preload.write_bytes(harm(preload.read_bytes()))
    else:
        preload.unlink()

    modules = loaded(rendered)
    assert PROLOG in modules["alone"] and modules["alone"] == modules["ours"]


def test_an_interpreter_that_cannot_compile_the_hooks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulock.install.hooks._PACK", "raise ValueError('no room')")
    config = write_simulated_node(tmp_path / "node", "workstation").config

    with pytest.raises(InstallError, match=r"cannot compile the hooks: ValueError: no room"):
        render_hooks(tmp_path / "hooks", config)
