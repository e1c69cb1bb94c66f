# SPDX-License-Identifier: Apache-2.0
"""The product's own modules in the world: their `os`, `time` and `fcntl` are its kernel's.

What else they have of the real machine has a stand-in: settings, syslog, threads that read,
slurmctld.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import gpulock
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.node.timed_read import TimedReader
from gpulock.slurm.scontrol import SlurmctldClient
from tests.world.site import Site

LEFT_OUT = ("cli", "install", "report", "text", "share", "simulate")


def product_modules() -> list[Any]:
    """Return every module of the product that an actor may run."""
    found: list[Any] = []
    for module in pkgutil.walk_packages(gpulock.__path__, "gpulock."):
        if module.name.split(".")[1] not in LEFT_OUT:
            found.append(importlib.import_module(module.name))
    return found


class StandIns:
    """What stands for a name of the product, of the same kind."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def settings(self, path: str, **more: bool) -> Settings:
        """Stand for read_settings and read_hook_settings."""
        del path, more
        return self._site.settings

    def log(self, settings: Settings | None, sentence: str, error: bool, **more: bool) -> None:
        """Stand for log_hook_line."""
        del settings, error, more
        self._site.log.append(sentence)

    def crashed(self, fault: BaseException) -> Refusal:
        """Stand for unexpected_refusal."""
        return self._site.crashed(fault)

    def described(self, what: str, fault: Exception) -> str:
        """Stand for describe_exception: nobody foresaw but refusals, and a folder that fails."""
        if isinstance(fault, Refusal) or (isinstance(fault, OSError) and what == "a reconcile"):
            return str(fault)
        return self._site.crashed(fault).why + what

    def task_message(self, sentence: str, code: int) -> int:
        """Stand for print_task_message."""
        self._site.log.append(sentence)
        return code


def read_now(reader: TimedReader, pid: int, act: Callable[[], bytes], seconds: float) -> bytes:
    """Stand for TimedReader.read: nobody hangs here."""
    del reader, pid, seconds
    return act()


@contextmanager
def inhabited(site: Site) -> Generator[None]:
    """Let the product's modules be of this world."""
    kernel, given = site.kernel, StandIns(site)
    before: list[tuple[Any, str, object]] = []

    def put(owner: Any, name: str, value: object) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def slurm_job(client: SlurmctldClient, job: str) -> dict[str, str] | None:
        del client
        return site.control.get(job)

    def obeyed(client: SlurmctldClient, *words: str) -> bool:
        del client, words
        return True

    stand_ins: dict[str, object] = {
        "os": kernel.os,
        "time": kernel.time,
        "fcntl": kernel.fcntl,
        "read_hook_settings": given.settings,
        "read_settings": given.settings,
        "log_hook_line": given.log,
        "unexpected_refusal": given.crashed,
        "describe_exception": given.described,
        "print_task_message": given.task_message,
    }
    for module in product_modules():
        for name, value in stand_ins.items():
            if name in vars(module):
                put(module, name, value)
    put(TimedReader, "read", read_now)
    put(SlurmctldClient, "job", slurm_job)
    put(SlurmctldClient, "do", obeyed)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
