# SPDX-License-Identifier: Apache-2.0
"""What users do on a shared workstation, to be run in a pid namespace of its own, as root.

Usage: python -m tests.labs.daemon.daemon_users STORY FOLDER [NUMBER]. Exits 0 when all holds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from gpulock.deadline import clock_boottime
from gpulock.workstation.wire import new_packet_socket
from tests.labs.daemon.daemon_site import Process, Site, said
from tests.support.seeds import chosen_seed
from tests.support.wait import wait_exit, wait_until

FIRST_UID = 31000
USERS = 20
KILLED = USERS // 2  # clients: the others stand in line until gpulockd is killed
SOME = 3  # stand in line when gpulockd is killed
LATEST = 100  # looks after the start of all: by then those to be killed are
HOURS = 7200.0  # seconds that one holds who is to be killed


def crowd(site: Site, rounds: int) -> None:
    """20 users run commands through the socket, and are killed at random; gpulockd is as well."""
    seed = chosen_seed("GPULOCK_SEED")
    print(f"GPULOCK_SEED={seed}")
    chance = random.Random(seed)
    for number in range(rounds):
        users = list(range(FIRST_UID, FIRST_UID + USERS))
        chance.shuffle(users)
        clients: dict[int, Process] = {}
        restarts = number % 2
        holder = site.run(FIRST_UID - 1, "-n", "8", seconds=HOURS) if restarts else None
        if holder:  # until some stand in line, however slow they are
            wait_until(lambda: len(site.locks()) == 8, why="all devices to be held")
        for uid in users:
            count = chance.choice((1, 1, 2, 4, 8))
            holds = chance.random() * 0.2
            clients[uid] = site.run(uid, "-n", str(count), "--wait", "10m", seconds=holds)
        dying = {uid: chance.randrange(LATEST) for uid in chance.sample(users, KILLED)}
        killed = kill_at_random(site, clients, dying, holder)
        for uid, client in clients.items():
            text = said(client)
            if client.returncode != -signal.SIGKILL:
                assert client.returncode == 0, f"uid {uid} exits {client.returncode}: {text}"
        print(f"round {number}: {len(killed)} killed, {len(site.events())} events")
        wait_until(lambda: not site.locks(), why="everything to be free again")
    assert not [event for event in site.events() if event[0] == "double"], "two holders"
    wait_until(lambda: not site.line(), why="nobody to stand in line")
    assert site.daemon.poll() is None, "gpulockd ended"


def kill_at_random(
    site: Site, clients: dict[int, Process], dying: dict[int, int], holder: Process | None
) -> set[int]:
    """Kill clients, and where one holds all devices gpulockd and that one; return the killed."""
    killed: set[int] = set()
    looks = 0

    def all_have_ended() -> bool:
        nonlocal holder, looks
        looks += 1
        if holder and len(site.line()) > SOME:
            site.daemon.kill()
            site.daemon.wait()
            site.start_daemon()
            holder.kill()
            said(holder)
            holder = None
        for uid, when in dying.items():
            if looks >= when and clients[uid].poll() is None:
                clients[uid].kill()
                killed.add(uid)
        return all(client.poll() is not None for client in clients.values())

    wait_until(all_have_ended, why=lambda: f"all clients to end: {site.line()}")
    assert not holder, "gpulockd was not killed"
    return killed


def rights(site: Site, _: int) -> None:
    """Nobody claims as another or as root, nor gives back what is another's."""
    mine, other = FIRST_UID, FIRST_UID + 1
    holder = site.run(mine, "-n", "2", seconds=HOURS)
    wait_until(lambda: len(site.locks()) == 2, why="two devices to be held")
    for words in (
        ("claim", "-n", "1", "--pid", str(holder.pid)),
        ("claim", "-n", "1", "--pid", str(site.daemon.pid)),
        ("release", "0"),
        ("release", "--pid", str(holder.pid)),
        ("release", "--force", "--reason", "mine", "0"),
        ("reap",),
        ("reserve", "3", "--reason", "mine"),
        ("quarantine", "3", "--reason", "mine"),
    ):
        call = site.gpulock(other, *words)
        text = said(call)
        print(f"{' '.join(words)}: exit {call.returncode}: {text.strip()}")
        assert call.returncode in (1, 2, 3), words
        assert "Traceback" not in text, text
        assert len(site.locks()) == 2, words
    holder.kill()
    said(holder)
    wait_until(lambda: not site.locks(), why="a killed command's devices to be free")
    site.daemon.terminate()
    wait_exit(site.daemon, why="gpulockd to stop")
    call = site.run(mine, "-n", "1")
    assert "gpulockd does not run" in said(call)


CALLS = 16  # of a user at most
SILENT = 300  # connections
WHY = ("--reason", "mine")


def hostile(site: Site, _: int) -> None:
    """An honest user gets a free GPU beside all that another one tries; how long that takes."""
    mallory, honest = FIRST_UID, FIRST_UID + 1

    def await_honest(beside: str) -> None:
        begun = clock_boottime()
        call = site.run(honest, "-n", "1", "--wait", "1m")
        text = said(call)
        assert call.returncode == 0, f"{beside}: {text}"
        print(f"{beside}: {clock_boottime() - begun:.1f} s")

    await_honest("nobody")
    wait_until(lambda: not site.locks(), why="everything to be free again")
    holder = site.run(mallory, "-n", "1", seconds=HOURS)
    wait_until(lambda: len(site.locks()) == 1, why="a device to be held")
    calls = [site.run(mallory, "-n", "8", "--wait", seconds=HOURS) for _ in range(CALLS)]
    wait_until(lambda: len(site.line()) == CALLS, why="all to stand in line")
    lines = [Path(f"/proc/{call.pid}/cmdline") for call in calls]
    wait_until(
        lambda: all(b"waiter.py" in line.read_bytes() for line in lines),
        why="each to wait as a small program",
    )
    await_honest("16 calls that wait for what their own user holds")
    for call in calls[: CALLS // 2]:
        call.send_signal(signal.SIGSTOP)
    await_honest("half of them stopped")
    releases = [site.gpulock(mallory, "release", "1") for _ in range(2 * CALLS)]
    await_honest("32 releases of what is nobody's")
    for call in [*calls, *releases]:
        call.kill()
        said(call)
    silent = [new_packet_socket() for _ in range(SILENT)]
    for one in silent:
        one.settimeout(0.0)
        with suppress(BlockingIOError):
            one.connect(str(site.lock / "socket"))
    await_honest(f"{SILENT} connections that say nothing")
    for one in silent:
        one.close()
    for device in ("1", "2", "3", "4"):
        assert "reserved" in said(site.gpulock(mallory, "reserve", device, "--to", "1h", *WHY))
    assert "minutes a day" in said(site.gpulock(mallory, "reserve", "5", "--to", "1h", *WHY))
    await_honest("all reserved that RESERVE_MAX allows")
    holder.kill()
    said(holder)


DOCKERD = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs")
BOX = "/usr/bin/busybox"
AS_ITS_USER = (f"--user={FIRST_UID}", "-eGPULOCK_CLAIM")


def docker(site: Site, _: int) -> None:
    """A container, which is the daemon's, keeps a claim as its user and with its token alone."""
    docker = ["docker", "-H", f"unix://{site.root}/docker.sock"]
    places = [f"--{name}={site.root}/{name}" for name in ("data-root", "exec-root", "pidfile")]
    with (site.root / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(["dockerd", *docker[1:], *DOCKERD, *places], stderr=log)
    version = [*docker, "version"]
    wait_until(
        lambda: subprocess.run(version, capture_output=True, check=False).returncode == 0,
        why=lambda: f"docker to answer\n{(site.root / 'dockerd.log').read_text()}",
    )
    (site.root / "docker.sock").chmod(0o666)
    pack = ["tar", "-C/", "-c", "--no-recursion", "usr", "usr/bin", BOX[1:]]
    image = subprocess.run(pack, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run([*docker, "import", "-", "box"], input=image, check=True)
    for number, options in enumerate(((), AS_ITS_USER[:1], AS_ITS_USER[1:], AS_ITS_USER)):
        name = f"box{number}"
        run = [*docker, "run", "-d", "--network=none", f"--name={name}", *options]
        call = site.gpulock(FIRST_UID, "run", "-n", "1", "--", *run, "box", BOX, "sleep", "9999")
        text = said(call)
        assert call.returncode == 0, text
        reaped = said(site.gpulock(0, "reap"))
        print(f"{options}: {reaped}")
        assert len(site.locks()) == (1 if options == AS_ITS_USER else 0), options
        subprocess.run([*docker, "rm", "-f", name], check=True)
        wait_until(lambda: not site.locks(), why="the GPU to be free")
    daemon.terminate()
    wait_exit(daemon, why="dockerd to end")


STORIES = {"crowd": crowd, "rights": rights, "hostile": hostile, "docker": docker}


def main(story: str, folder: str, number: str = "1") -> int:
    """Tell one story; return the exit code."""
    os.umask(0o022)
    site = Site(Path(folder))
    try:
        STORIES[story](site, int(number))
    finally:
        site.close()
        print(site.log.read_text()[-4000:])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
