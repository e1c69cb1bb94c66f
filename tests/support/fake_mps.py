# SPDX-License-Identifier: Apache-2.0
"""A stand-in for nvidia-cuda-mps-control: the same options, commands, pipes and processes.

As NVIDIA's does, `-d` goes into the background in a session of its own, listens at `control` in
CUDA_MPS_PIPE_DIRECTORY and writes its pid there. Without an option it passes commands from stdin
on. A server is a child of the daemon, and has the card open. `faults` tell what goes wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpulock.daemon.mps.folder import write_server_note
from gpulock.job.mps import mps_folder

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


class FakeMps:
    """The program in a folder of its own; `card` is the device node that its servers open."""

    def __init__(self, folder: Path, card: Path) -> None:
        folder.mkdir(mode=0o755)
        self.folder = folder
        self.program = folder / "nvidia-cuda-mps-control"
        for path in (self.program, folder / "nvidia-cuda-mps-server"):
            path.write_text(PROGRAM.replace("{python}", sys.executable))
            path.chmod(0o755)
        (folder / "card").write_text(str(card))
        self.fault()

    def fault(self, *words: str) -> None:
        """Let this go wrong from now on."""
        (self.folder / "faults").write_text(" ".join(words))


def leave_mps(mps_dir: Path, bus: str, uid: int, boot_id: str) -> None:
    """Let a card's folder stand as while the MPS of a user ends."""
    folder = Path(mps_folder(str(mps_dir), bus))
    mps_dir.mkdir(mode=0o755)
    folder.mkdir()
    write_server_note(str(folder), uid, boot_id)
