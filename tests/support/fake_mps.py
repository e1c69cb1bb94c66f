# SPDX-License-Identifier: Apache-2.0
"""A stand-in for nvidia-cuda-mps-control: the same options, commands, pipes and processes.

As NVIDIA's does, `-d` goes into the background in a session of its own, listens at `control` in
CUDA_MPS_PIPE_DIRECTORY and writes its pid there. Without an option it passes commands from stdin
on. A server is a child of the daemon, and has the card open. `faults` tell what goes wrong.

Of systemd the two programs that gpulockd asks stand beside it. What a service started has its name
in the environment there, which stands for its cgroup.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from gpulock.daemon.mps.unit import CTL, PROGRAMS, write_server_note
from gpulock.job.mps import mps_folder
from gpulock.node.context import Node

PROGRAM = """#!{python} -IS
import os, signal, socket, sys, time

here = os.path.dirname(os.path.abspath(__file__))
pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
logs = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
control = pipes + "/control"


def faults():
    return open(here + "/faults").read().split()


def connected():
    one = socket.socket(socket.AF_UNIX)
    os.chdir(pipes)  # the path of a test may be longer than a socket's name
    one.connect("control")
    return one


def serve():
    if "no-card" not in faults():
        os.open(open(here + "/card").read(), os.O_RDWR)
    if "deaf-server" in faults():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()


def log(text):
    with open(logs + "/control.log", "a") as file:
        file.write(text + "\\n")


def start_server():
    if "no-server" in faults():
        return log("Server exited with status 1")
    pid = os.fork()
    if pid == 0:
        name = here + "/nvidia-cuda-mps-server"
        os.execv(name, [name])
    servers.append(pid)


def quit_all():
    for pid in servers:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    if "leaves-pipes" not in faults():
        os.unlink(control)
        os.unlink(pipes + "/nvidia-cuda-mps-control.pid")


def answer(words):
    if words[:1] == ["start_server"] and not servers:
        start_server()
    elif words[:1] == ["get_server_list"]:
        return "".join("%d\\n" % pid for pid in servers)
    elif words[:1] == ["quit"]:
        if "deaf" in faults():
            time.sleep(1000)
        quit_all()
        return None
    return ""


def daemon(listener):
    log("Starting control daemon using socket " + control)
    with open(pipes + "/nvidia-cuda-mps-control.pid", "w") as file:
        file.write("%d" % os.getpid())
    while True:
        one, _ = listener.accept()
        with one, one.makefile("rw") as lines:
            for line in lines:
                said = answer(line.split())
                if said is None:
                    return
                lines.write(said)
                lines.flush()


def begin():
    if "fails" in faults():
        log("An instance of this daemon is already running")
        sys.exit(1)
    if "never-ready" in faults():
        time.sleep(1000)
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(pipes)
    listener.bind("control")
    listener.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    daemon(listener)
    os._exit(0)


servers = []
if os.path.basename(sys.argv[0]) == "nvidia-cuda-mps-server":
    serve()
elif sys.argv[1:] == ["-d"]:
    begin()
else:
    try:
        asked = connected()
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    asked.sendall(sys.stdin.buffer.read())
    asked.shutdown(socket.SHUT_WR)
    while data := asked.recv(4096):
        sys.stdout.write(data.decode())
"""


MANAGER = """#!{python} -IS
import contextlib, json, os, shlex, signal, subprocess, sys, time

units = os.path.dirname(os.path.abspath(__file__)) + "/units/"


def environ_of(pid):
    # It reads as empty for a moment while execve(2) sets a program up (docs/facts/locking.md).
    for _ in range(300):
        if environ := open(f"/proc/{pid}/environ", "rb").read():
            return environ.split(b"\\0")
        os.readlink(f"/proc/{pid}/exe")  # which what is over, and the kernel's own, has not
        time.sleep(0.001)
    return []


def members(unit):
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if ("UNIT=" + units + unit).encode() in environ_of(pid):
                found[int(pid)] = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
        except OSError:
            continue
    return found


def main_pid(unit):
    return next((pid for pid, words in members(unit).items() if words[-2:-1] == [b"-d"]), 0)


def call(of, words, seconds):
    try:
        null = subprocess.DEVNULL
        return subprocess.run(
            words, env=of["env"], user=of["uid"], start_new_session=True, timeout=seconds,
            cwd="/", stdin=null, stdout=null, stderr=null,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def end(unit, of):
    for number in (signal.SIGTERM, signal.SIGKILL):
        late = time.monotonic() + of["stop_seconds"]
        for pid in members(unit):
            # One may end of another's end: who asks MPS, once its daemon is gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while members(unit) and (number == signal.SIGKILL or time.monotonic() < late):
            time.sleep(0.01)
    if os.path.exists(units + unit):
        os.unlink(units + unit)


def systemd_run(words):
    options = {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0)[2:].partition("=")
        if name in ("property", "setenv"):
            name, _, value = value.partition("=")
        options[name] = value
    unit, uid = options["unit"], int(options["uid"])
    assert not os.path.exists(units + unit), unit
    of = {
        "env": {"PATH": "/usr/bin:/bin", "UNIT": units + unit},
        "uid": uid if uid != os.geteuid() else None,
        "stop": shlex.split(options["ExecStop"]),
        "stop_seconds": float(options["TimeoutStopSec"]),
    }
    of["env"].update({key: value for key, value in options.items() if key[:4] == "CUDA"})
    os.makedirs(units, exist_ok=True)
    with open(units + unit, "w") as file:
        json.dump(of, file)
    seconds = float(options["TimeoutStartSec"])
    for command in (words, shlex.split(options["ExecStartPost"])):
        if call(of, command, seconds):
            end(unit, of)
            sys.exit(f"Job for {unit} failed.")


def systemctl(words):
    unit = words[-1]
    if words[0] == "show":
        pid = main_pid(unit)
        print(f"MainPID={pid}\\nActiveState={'active' if pid else 'inactive'}")
    elif os.path.exists(units + unit):
        with open(units + unit) as file:
            of = json.load(file)
        call(of, of["stop"], of["stop_seconds"])
        end(unit, of)


act = {"systemd-run": systemd_run, "systemctl": systemctl}
act[os.path.basename(sys.argv[0])](sys.argv[1:])
"""


class FakeMps:
    """The programs in a folder of their own; `card` is the device node that servers open."""

    def __init__(self, folder: Path, card: Path) -> None:
        folder.mkdir(mode=0o755)
        self.folder = folder
        for name in (*PROGRAMS, "nvidia-cuda-mps-server"):
            text = MANAGER if name.startswith("system") else PROGRAM
            (folder / name).write_text(text.replace("{python}", sys.executable))
            (folder / name).chmod(0o755)
        (folder / "card").write_text(str(card))
        self.fault()

    def fault(self, *words: str) -> None:
        """Let this go wrong from now on."""
        (self.folder / "faults").write_text(" ".join(words))

    def processes(self) -> set[int]:
        """Return the processes of every MPS that was started here."""
        program = f"{self.folder}/nvidia-cuda-mps"
        every = psutil.process_iter(["cmdline"], ad_value=())
        return {one.pid for one in every if program in " ".join(one.info["cmdline"])}

    def stop(self) -> None:
        """End every service."""
        for unit in (self.folder / "units").glob("*"):
            subprocess.run([self.folder / CTL, "stop", unit.name], check=True)


def leave_mps(node: Node, bus: str, uid: int) -> None:
    """Let a card's folder stand as while the MPS of a user ends."""
    folder = Path(mps_folder(node.settings.mps_dir, bus))
    folder.mkdir(parents=True)
    write_server_note(str(folder), uid, node.boot_id)
