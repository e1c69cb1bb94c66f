# SPDX-License-Identifier: Apache-2.0
"""Count the modules and functions that three things pass through: `python -m tests.bench.walks`.

- A Grid Engine prolog that claims 2 of 8 GPUs.
- A dead owner, from the event that its process ended to the line in the history.
- A utilisation, from NVML to the answer of a scrape.

Counted with sys.setprofile: functions of gpulock that were called, each once, without lambdas,
comprehensions and what runs at import. The node of the prolog has had a
job before. Of the utilisation only modules are counted: those in which the value was seen. Of
gpulockd the main thread is counted; the driver's files are read in another. Fewer is better: a
reader follows these ways. `--list` names each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.deadline import Deadline
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.workstation.process_claims import make_process_owner
from tests.support.history_site import read_history
from tests.support.scene import Scene, folder
from tests.support.starter import Shepherd
from tests.support.wait import wait_exit, wait_until

FIRST, LAST = "_owner_ended", "append_history_lines"  # the pidfd event, the line
PERCENT = 73  # a utilisation that no other number is
WALKS = "tests.bench.walks"
DEPTH = 6  # levels at which a value is looked for in a record
OURS = ("/gpulock/", "/gpulock_exporter/")
# Runs a hook as its interpreter would, and writes to stderr, as JSON, what it called of ours.
PROFILED_HOOK = """
import json, os, sys
calls = set()
def note(frame, event, _):
    code = frame.f_code
    if event == "call" and "/lib/gpulock/" in code.co_filename and code.co_name[0] != "<":
        calls.add((code.co_filename, f"{code.co_name}:{code.co_firstlineno}"))
def exit_hook(code):
    sys.setprofile(None)
    os.write(2, json.dumps(sorted(calls)).encode())
    end(code)
end, os._exit = os._exit, exit_hook
sys.argv = sys.argv[1:]
__file__ = sys.argv[0]
with open(__file__) as file:
    text = file.read()
counted = text.replace("main(sys.argv", "sys.setprofile(note) or main(sys.argv")
assert counted != text
exec(compile(counted, __file__, "exec"))
"""

Calls = set[tuple[str, str]]


def main(words: list[str]) -> None:
    """Count and print; `daemon` is the program that is counted."""
    if words[:1] == ["daemon"]:
        sys.exit(be_daemon(words[1], Path(words[2])))
    listed = "--list" in words
    with folder("walks") as root:
        show("Grid Engine prolog, 2 of 8", prolog_calls(root / "prolog"), listed)
        show("dead owner to history line", dead_owner_calls(root / "owner"), listed)
        modules = sorted(scrape_modules(root / "scrape"))
        print(f"{'utilisation, NVML to scrape':<28} {len(modules):>4} modules")
        if listed:
            print("\n".join(f"    {name}" for name in modules))


def show(name: str, calls: Calls, listed: bool) -> None:
    """Print one walk; with `listed` every function."""
    modules = {module for module, _ in calls}
    print(f"{name:<28} {len(modules):>4} modules {len(calls):>5} functions")
    if listed:
        print("\n".join(f"    {module}: {function}" for module, function in sorted(calls)))


def prolog_calls(root: Path) -> Calls:
    """Return what the prolog of a job that gets 2 of 8 GPUs calls."""
    scene = Scene(root)
    told = scene.root / "told"
    settled = int(scene.config.stat().st_ctime) + 1  # a younger file is copied by each hook
    wait_until(lambda: time.time() > settled, why="the settings to be a second old")
    with Shepherd(scene.spool(1, 2)) as shepherd:
        for path in (scene.hooks.prolog, scene.hooks.epilog):  # the first claim of a boot does more
            shepherd.run([str(path), str(shepherd.pid)], shepherd.job.hook_environ())
        program = [scene.interpreter, "-IS", "-c", PROFILED_HOOK]
        hook = [str(scene.hooks.prolog), str(shepherd.pid)]
        run = shepherd.run([*program, *hook], shepherd.job.hook_environ(), stderr=str(told))
    if run.status != 0:
        raise RuntimeError(f"the prolog exits {run.status}: {told.read_text()}")
    return {(module_of(path), name) for path, name in json.loads(told.read_text())}


def is_ours(path: str) -> bool:
    """Return whether a file is of this checkout; a package of its `.venv` is not."""
    return any(part in path for part in OURS) and "/site-packages/" not in path


def module_of(path: str) -> str:
    """Return the dotted module of a file of ours."""
    place = max(path.rfind(part) for part in OURS)
    return path[place + 1 :].removesuffix(".py").replace("/", ".")


class Profile:
    """Functions of ours that are called in this thread from the event to the line."""

    def __init__(self) -> None:
        self.calls: Calls = set()
        self._on = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note one call (the protocol of sys.setprofile)."""
        code = frame.f_code
        ours = is_ours(code.co_filename)
        if event == "call" and code.co_name == FIRST:
            self._on = True
        if event == "return" and code.co_name == LAST:
            self._on = False
        if event == "call" and self._on and ours and not code.co_name.startswith("<"):
            self.calls.add((module_of(code.co_filename), f"{code.co_name}:{code.co_firstlineno}"))


def dead_owner_calls(root: Path) -> Calls:
    """Return what gpulockd calls from the end of an owner's process to the history line."""
    scene, told = Scene(root), root / "told"
    node = scene.node()
    owner = subprocess.Popen(["sleep", "600"], start_new_session=True)
    template = make_process_owner(node, owner.pid, "walk")
    claim_devices(
        node, template, ClaimRequest(2), lambda: make_liveness_judge(node), Deadline(30.0)
    )
    program = [sys.executable, "-m", WALKS, "daemon", str(scene.config), str(told)]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            wait_until(lambda: is_watched(owner.pid, daemon.pid), why="gpulockd to watch it")
        finally:
            owner.kill()
            owner.wait()
        state = Path(node.settings.state_dir)
        wait_until(lambda: read_history(state) != [], why="the history line")
        daemon.terminate()
        wait_exit(daemon, why="the end of gpulockd")
    return {(module, name) for module, name in json.loads(told.read_text())}


def is_watched(pid: int, watcher: int) -> bool:
    """Return whether a process has a pidfd of another."""
    files = Path(f"/proc/{watcher}/fdinfo").iterdir()
    return any(f"\nPid:\t{pid}\n" in file.read_text() for file in files)


def be_daemon(config: str, told: Path) -> int:
    """Run gpulockd, and write its calls to `told` at its end."""
    from gpulock.daemon.app import main as run_gpulockd

    profile = Profile()
    sys.argv = ["gpulockd", "--config", config]
    sys.setprofile(profile.note)
    try:
        return run_gpulockd()
    finally:
        sys.setprofile(None)
        told.write_text(json.dumps(sorted(profile.calls)))


def scrape_modules(root: Path) -> set[str]:
    """Look, tick and answer a scrape in this process; return the modules that saw the value."""
    from gpulock_exporter.app.exporter import Exporter
    from gpulock_exporter.frame import decode_frame, encode_frame
    from gpulock_exporter.nvml.source import NvmlSource
    from gpulock_exporter.state.snapshot import current_moment
    from gpulock_exporter.web.http import HttpRequest

    from gpulock.node.context import Node
    from gpulock.node.settings_file import read_settings
    from tests.nvml.double import Double

    seen: set[str] = set()

    def note(frame: FrameType, event: str, value: object) -> None:
        path = frame.f_code.co_filename
        if event != "return" or not is_ours(path):
            return
        if module_of(path) not in seen and (holds(value) or holds(frame.f_locals)):
            seen.add(module_of(path))

    with Double(root, preset="dgx1") as nvml:
        nvml.load(0, PERCENT)
        nvml.set("gpu0.utilization.gpu", str(PERCENT))
        nvml.load_here()
        node = Node(read_settings(str(nvml.node / "gpulock.conf")))
        source = NvmlSource(sys_root=f"{nvml.node}/sys")
        source.open()
        source.collect(True)
        node.settings.exporter_dir = str(root / "exporter")
        Path(node.settings.exporter_dir).mkdir()
        exporter = Exporter(node, current_moment)
        exporter.open()
        exporter.list_devices(0.0)
        supervisor: Any = SimpleNamespace(fault="", unkillable=0, left_out=dict)
        sys.setprofile(note)
        line = encode_frame(source.collect(True))
        exporter.tick([decode_frame(line)], supervisor)
        answer = exporter.handler()(HttpRequest("/metrics"))
        sys.setprofile(None)
        source.close()
    if f" {PERCENT / 100}".encode() not in bytes(answer.body):
        raise RuntimeError("the utilisation is not in the scrape")
    return seen


def holds(value: object, depth: int = DEPTH) -> bool:
    """Return whether a value is the utilisation, or has it within."""
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, (int, float)):
        return value in (PERCENT, PERCENT / 100)
    if isinstance(value, str):
        return str(PERCENT / 100) in value
    if isinstance(value, bytes):
        return str(PERCENT / 100).encode() in value
    if depth == 0:
        return False
    within: list[object] = []
    if isinstance(value, dict):
        within = list(cast("dict[object, object]", value).values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        within = list(cast("list[object]", value))
    elif any(part.strip("/") in type(value).__module__ for part in OURS):
        names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", {})]
        within = [getattr(value, name, None) for name in names]
    else:
        return False
    return any(holds(one, depth - 1) for one in within)


if __name__ == "__main__":
    main(sys.argv[1:])
