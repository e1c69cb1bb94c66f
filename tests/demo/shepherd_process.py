# SPDX-License-Identifier: Apache-2.0
"""The program of a simulated sge_shepherd: prolog, job, epilog, one after another.

It runs as `python -IS <this file>`, so it imports nothing of gpulock. It reads its orders as
JSON from standard input, writes `ready` to standard output when it looks like a shepherd, and
then leaves behind in its working folder what the real one does: `pid`, `job_pid`, `addgrpid`,
`exit_status`; and one line a finished child in `simulated_results`.

One thing differs: a real job is known by its additional group, which only root can give. Here
the shepherd leads a session and the job stays in it, in a process group of its own; the hooks
lead sessions of their own, as real ones do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

COMM = "sge_shepherd"
MISSING = "missing"  # there is no such program, or it may not be run
HOOK_PATH = "/usr/bin:/bin"
SIGNALLED = 128


def main() -> int:
    """Play the shepherd of the job whose spool folder is the working folder."""
    orders: dict[str, Any] = json.load(sys.stdin)
    os.setsid()
    os.umask(0o022)
    overwrite_small_file("/proc/self/comm", COMM)
    overwrite_small_file("pid", f"{os.getpid()}\n")
    overwrite_small_file("exit_status", "")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    status = run_hook("prolog", orders)
    if status == MISSING:
        return 0  # the job goes to error and there is no epilog either
    if status == 0:
        run_job(orders)
    run_hook("epilog", orders)
    return 0


def run_hook(name: str, orders: dict[str, Any]) -> int | str:
    """Run a hook in the clean environment that the queue's configuration gives it."""
    command: list[str] = orders[name]
    if not command:
        return 0
    environ = {"PATH": HOOK_PATH, **orders["hook_environment"]}
    return run_shepherd_child(name, command, environ, orders, {"start_new_session": True})


def run_job(orders: dict[str, Any]) -> int | str:
    """Run the job as its owner, with the environment file as the prolog left it."""
    others: dict[str, Any] = {"preexec_fn": os.setpgrp}  # process_group= is of Python 3.11
    if os.geteuid() == 0:
        gid = orders["add_grp_id"]
        others |= {"user": orders["uid"], "group": orders["gid"]}
        others |= {"extra_groups": [gid] if gid else []}
        if gid:
            overwrite_small_file("addgrpid", f"{gid}\n")
    return run_shepherd_child("job", orders["command"], read_spooled_environment(), orders, others)


def run_shepherd_child(
    name: str,
    command: list[str],
    environ: dict[str, str],
    orders: dict[str, Any],
    others: dict[str, Any],
) -> int | str:
    """Run one child, wait for it and record its status."""
    output = os.open(orders["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        child = subprocess.Popen(
            command,
            cwd=orders["cwd"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **others,
        )
    except OSError as fault:
        os.write(output, f"{command[0]}: {fault}\n".encode())
        return record_child_status(name, MISSING)
    finally:
        os.close(output)
    if name == "job":
        overwrite_small_file("job_pid", f"{child.pid}\n")
    status = child.wait()
    return record_child_status(name, status if status >= 0 else SIGNALLED - status)


def record_child_status(name: str, status: int | str) -> int | str:
    """Note how a child ended."""
    with open("simulated_results", "a") as file:
        file.write(f"{name}={status}\n")
    overwrite_small_file("exit_status", f"{status}\n")
    return status


def read_spooled_environment() -> dict[str, str]:
    """Read the environment file; the last line of a name wins, as with INHERIT_ENV."""
    environ: dict[str, str] = {}
    with open("environment", errors="surrogateescape") as file:
        for line in file.read().split("\n"):
            name, equals, value = line.partition("=")
            if equals:
                parts = [part.replace("\\n", "\n") for part in value.split("\\\\")]
                environ[name] = "\\".join(parts)
    return environ


def overwrite_small_file(path: str, text: str) -> None:
    """Replace what a small file holds."""
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
