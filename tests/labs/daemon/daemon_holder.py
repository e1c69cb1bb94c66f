# SPDX-License-Identifier: Apache-2.0
"""Believe to have the devices of CUDA_VISIBLE_DEVICES alone, and cry out where that is not so.

Usage: python -IS daemon_holder.py FOLDER SECONDS. The kernel lets go of an flock when its holder
dies, so it is a judge that knows nothing of gpulock's records.
"""

import fcntl
import os
import sys
import time


def main(folder: str, seconds: float) -> int:
    """Hold a lock a device; return 1 where somebody else has one."""
    mask = os.environ["CUDA_VISIBLE_DEVICES"]
    double = False
    for device in mask.split(","):
        fd = os.open(f"{folder}/{device}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            double = True
    note(folder, "double" if double else "take", mask)
    time.sleep(seconds)
    note(folder, "give", mask)
    return int(double)


def note(folder: str, event: str, mask: str) -> None:
    """Append one line in one write."""
    fd = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(fd, f"{event} {os.getpid()} {os.getuid()} {mask}\n".encode())
    os.close(fd)


if __name__ == "__main__":
    os.umask(0)
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
