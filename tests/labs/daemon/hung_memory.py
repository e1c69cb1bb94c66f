# SPDX-License-Identifier: Apache-2.0
"""A process whose memory map stays locked: a thread of it hangs in munmap, in the kernel.

    python tests/labs/daemon/hung_memory.py FOLDER

A FUSE file system that answers nothing but the first reads, and a program with one of its files
in memory: one thread waits for a page, another gives the page back and waits for the first one.
It is what a dead card does to a process that is in the driver's mmap. FOLDER is mounted over.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.wait import wait_until

SOURCE = """\
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
static volatile char *page;
static void *look(void *x) { return (void *)(long)page[0]; }
static sigset_t told;
static void *give_back(void *x)
{
    int number;
    prctl(PR_SET_NAME, "gives back");
    sigwait(&told, &number);
    munmap((void *)page, 4096);
    return x;
}
int main(int count, char **words)
{
    sigemptyset(&told);
    sigaddset(&told, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &told, 0);
    int fd = open(words[1], O_RDONLY);
    page = mmap(0, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
    pthread_t one, other;
    pthread_create(&one, 0, look, 0);
    pthread_create(&other, 0, give_back, 0);
    for (;;)
        pause();
}
"""
HEADER = struct.Struct("<IIQQIIII")  # struct fuse_in_header, linux/fuse.h
LOOKUP, GETATTR, OPEN, READ, INIT, OPENDIR = 1, 3, 14, 15, 26, 27
FORGOTTEN = frozenset((2, 42))  # FORGET, BATCH_FORGET: nobody waits for an answer
EIO, ENOSYS = 5, 38
FAILED_READS = 2  # a page fault is tried again without the lock at first
HOUR = 3600


def serve(fuse: int) -> None:
    """Answer everything about one file, but what is in it."""
    reads = 0
    while True:
        request = os.read(fuse, 1 << 20)
        _, kind, unique, node, *_ = HEADER.unpack(request[: HEADER.size])
        if kind == INIT:
            answer(
                fuse,
                unique,
                struct.pack(
                    "<IIIIHHIIHHI7I", 7, 31, 65536, 0, *[12, 9, 65536], *[1, 32, 0, 0], *[0] * 7
                ),
            )
        elif kind == LOOKUP:
            answer(fuse, unique, struct.pack("<QQQQII", 2, 0, HOUR, HOUR, 0, 0) + attributes(2))
        elif kind == GETATTR:
            answer(fuse, unique, struct.pack("<QII", HOUR, 0, 0) + attributes(node))
        elif kind in (OPEN, OPENDIR):
            answer(fuse, unique, struct.pack("<QII", 7, 2, 0))
        elif kind == READ:
            reads += 1
            if reads <= FAILED_READS:
                answer(fuse, unique, error=EIO)
            else:
                print("a thread waits for its page", flush=True)
        elif kind not in FORGOTTEN:
            answer(fuse, unique, error=ENOSYS)


def answer(fuse: int, unique: int, body: bytes = b"", error: int = 0) -> None:
    """Write one reply (struct fuse_out_header)."""
    os.write(fuse, struct.pack("<IiQ", 16 + len(body), -error, unique) + body)


def attributes(node: int) -> bytes:
    """Return struct fuse_attr of the folder (1) or of the file."""
    mode, size = (0o40755, 0) if node == 1 else (0o100644, 8192)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, 16, *[0] * 6, mode, 1, 0, 0, 0, 4096, 0)


def mount(folder: Path) -> int:
    """Mount a FUSE file system; return its descriptor."""
    fuse = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"gpulock-hung", str(folder).encode(), b"fuse", 6, options) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(folder))
    return fuse


@contextmanager
def hung_process(folder: Path, environ: dict[str, str], uid: int) -> Generator[int]:
    """Give the pid of a process of a user whose memory nobody can read; take all of it down."""
    program, place = folder / "hung", folder / "mnt"
    place.mkdir()
    command = ["gcc", "-pthread", "-x", "c", "-o", str(program), "-"]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    server = subprocess.Popen([sys.executable, __file__, str(place)], stdout=subprocess.PIPE)
    victim: subprocess.Popen[bytes] | None = None
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"mounted\n"
        victim = subprocess.Popen([program, place / "file"], env=environ, user=uid, group=uid)
        assert server.stdout.readline() == b"a thread waits for its page\n"
        victim.send_signal(signal.SIGUSR1)
        wait_for(victim.pid)
        yield victim.pid
    finally:
        for process in (victim, server):
            if process is not None:
                process.kill()
        subprocess.run(["umount", "-l", place], check=False)
        for process in (server, victim):
            if process is not None:
                process.wait(60)
        if server.stdout is not None:
            server.stdout.close()


def wait_for(pid: int) -> None:
    """Wait until a thread of a process hangs in the kernel while it gives memory back."""

    def hangs() -> bool:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return any("(gives back) D " in stat for stat in stats)  # for a page one waits in D as well

    wait_until(hangs, why=f"a thread of {pid} to hang")


def main() -> None:
    """Mount, say so, serve until killed."""
    fuse = mount(Path(sys.argv[1]))
    print("mounted", flush=True)
    serve(fuse)


if __name__ == "__main__":
    main()
