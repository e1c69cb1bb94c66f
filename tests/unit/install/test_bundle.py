# SPDX-License-Identifier: Apache-2.0
"""gpulock.bundle: installed hooks load their modules from it, and from files without it."""

from __future__ import annotations

import json
import marshal
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.bundle import HEAD, NAME
from gpulock.install.hook_script import HOOKS
from gpulock.install.hooks import HookPaths, InstallError, render_hooks
from gpulock.simulate.node import write_simulated_node

pytestmark = pytest.mark.slow

TOLD = """    import json
    ours = [name for name in sys.modules if name.partition(".")[0] == "gpulock"]
    files = [name for name in ours if getattr(sys.modules[name], "__file__", None)]
    os.write(1, json.dumps({"ours": sorted(ours), "files": sorted(files), **more}).encode())
    os._exit(0)
"""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> HookPaths:
    root = tmp_path_factory.mktemp("bundle")
    return render_hooks(root / "hooks", write_simulated_node(root / "node", "workstation").config)


@pytest.fixture
def hooks(rendered: HookPaths) -> Iterator[HookPaths]:
    """Give the rendered hooks, and put back their bundle."""
    path = rendered.library / NAME
    whole = path.read_bytes()
    yield rendered
    path.write_bytes(whole)


def loaded(hooks: HookPaths, name: str = "prolog/sge", extra: str = "more = {}") -> dict[str, Any]:
    """Run a hook up to the call of its main, then `extra`; return what is loaded, and `more`."""
    text = (hooks.folder / name).read_text()
    head, main, _ = text.partition('if __name__ == "__main__":\n')
    script = hooks.folder / "variant"
    script.write_text(f"{head}{main}    {extra}\n{TOLD}")
    done = subprocess.run(
        [sys.executable, "-IS", str(script)], capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_head_has_room_for_the_larger_code_of_other_pythons(hooks: HookPaths) -> None:
    """That of 3.14 takes 1,100 bytes more than that of 3.11, and a longer path takes its length."""
    head = (hooks.library / NAME).read_bytes()[:HEAD]

    assert len(head.rstrip(b"\0")) < HEAD * 2 / 3


def test_an_installation_whose_head_does_not_fit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulock.install.hooks.HEAD", 4096)
    config = write_simulated_node(tmp_path / "node", "workstation").config

    with pytest.raises(InstallError, match=r"cannot pack the hooks: .*the head takes \d+ bytes"):
        render_hooks(tmp_path / "hooks", config)


@pytest.mark.parametrize("name", HOOKS)
def test_an_installed_hook_reads_no_module_from_a_file_of_its_own(
    hooks: HookPaths, name: str
) -> None:
    found = loaded(hooks, name)

    assert f"gpulock.{HOOKS[name][1]}" in found["ours"]
    assert found["files"] == []


def test_a_module_that_is_needed_later_comes_from_the_bundle(hooks: HookPaths) -> None:
    later = "import gpulock.alloc.reaper as found; more = {'by': [type(found.__loader__).__name__]}"

    assert loaded(hooks, extra=later)["by"] == ["BundleFinder"]


def test_a_bundle_that_was_replaced_meanwhile_is_not_read(hooks: HookPaths) -> None:
    path = hooks.library / NAME
    later = (
        f"os.rename({str(path) + '.new'!r}, {str(path)!r});"
        " import gpulock.alloc.reaper as found; more = {'by': [type(found.__loader__).__name__]}"
    )
    Path(f"{path}.new").write_bytes(path.read_bytes())

    assert loaded(hooks, extra=later)["by"] == ["SourceFileLoader"]


def cut(data: bytes) -> bytes:
    """Return a bundle without its end."""
    return data[: HEAD + 1000]


def cut_head(data: bytes) -> bytes:
    """Return a bundle without most of its head."""
    return data[:100]


def other_interpreter(data: bytes) -> bytes:
    """Return the bundle of another interpreter, whose code this one cannot run."""
    _, _, index = marshal.loads(data[:HEAD])
    return marshal.dumps((b"none", b"\xff", index)).ljust(HEAD, b"\0") + data[HEAD:]


def of_other_hooks(data: bytes) -> bytes:
    """Return a bundle that knows none of the hooks."""
    magic, code, (modules, _) = marshal.loads(data[:HEAD])
    return marshal.dumps((magic, code, (modules, {}))).ljust(HEAD, b"\0") + data[HEAD:]


@pytest.mark.parametrize("harm", [cut, cut_head, other_interpreter, of_other_hooks])
def test_hooks_pass_by_a_bundle_that_is_of_no_use(
    hooks: HookPaths, harm: Callable[[bytes], bytes]
) -> None:
    path = hooks.library / NAME
    path.write_bytes(harm(path.read_bytes()))

    found = loaded(hooks)

    assert "gpulock.sge.prolog" in found["ours"] and found["files"] == found["ours"]


def test_hooks_do_without_a_bundle(hooks: HookPaths) -> None:
    (hooks.library / NAME).unlink()

    found = loaded(hooks)

    assert "gpulock.sge.prolog" in found["ours"] and found["files"] == found["ours"]


def test_a_hook_does_without_pythons_os_until_it_needs_it(hooks: HookPaths) -> None:
    seen = "more = {'abc': ['_collections_abc' in sys.modules], 'all': []}"
    more = (
        "more = {'path': [os.path.join('a', 'b'), os.path.__name__],"
        " 'abc': ['_collections_abc' in sys.modules],"
        " 'made': [os.makedirs.__module__, sys.modules['os'].__file__ is not None],"
        " 'all': sorted(set(dir(sys.modules['os'])) - set(dir(os))),"
        " 'none': [hasattr(os, 'no_such_name'), hasattr(os, 'other')]}"
    )

    assert loaded(hooks, extra=seen)["abc"] == [False]
    found = loaded(hooks, extra=more)
    assert found["path"] == ["a/b", "posixpath"]
    assert found["abc"] == [False]
    assert found["made"] == ["os", True]
    assert found["all"] == []
    assert found["none"] == [False, False]


def test_a_module_may_begin_with_a_name_of_os_path(hooks: HookPaths) -> None:
    """As sysconfig does, which `import ctypes` loads since Python 3.14."""
    more = (
        "from os.path import join; import os.path as place;"
        " more = {'path': [join('a', 'b'), place.__name__, os.path is place],"
        " 'abc': ['_collections_abc' in sys.modules]}"
    )

    found = loaded(hooks, extra=more)
    assert found["path"] == ["a/b", "posixpath", True]
    assert found["abc"] == [False]
    assert loaded(hooks, extra="import ctypes; more = {}")["ours"]


def test_the_lent_os_has_the_environment_as_pythons_has(hooks: HookPaths) -> None:
    script = hooks.folder / "variant"
    text = hooks.prolog.read_text().partition('if __name__ == "__main__":\n')[0]
    script.write_text(
        f"{text}lent = os.environ\ndel sys.modules['os']\nimport os\n"
        "assert type(lent) is dict\nassert lent == dict(os.environ), (lent, dict(os.environ))\n"
    )
    environ = {b"PLAIN": b"x", b"UTF8": "ü".encode(), b"BYTES": b"\xff\xfe", b"EMPTY": b""}

    done = subprocess.run(
        [sys.executable, "-IS", str(script)],
        env={os.fsdecode(k): os.fsdecode(v) for k, v in environ.items()},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
