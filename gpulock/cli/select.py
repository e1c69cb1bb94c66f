# SPDX-License-Identifier: Apache-2.0
"""What an argument of the command line means: a device, a job, a process; pure.

A job is compared as a whole, never by its beginning: 12 is not 123, and task 1 is not task 11.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulock.cli.session import CommandRefusedError
from gpulock.node.devices import SHARE, Device, pci_bus_key
from gpulock.report.scan import ClaimQuery
from gpulock.store.owner import Owner

LEAST_UUID = 8  # characters of a UUID that must be given
NAME_CHARACTERS = 64  # characters of any name
JOB = re.compile(r"(?:job[ :])?([0-9]+)(?:\.([0-9]+))?")
PID = re.compile(r"pid[ :]([0-9]+)")
DEVICE = re.compile(r"(?:device|gpu)[ :](.+)", re.IGNORECASE)
LOCK_ID = re.compile(rf"([0-9a-f:]+\.[0-9a-f])(\.gi[0-9]+\.ci[0-9]+)?({re.escape(SHARE)}[0-9]+)?")


class SelectError(CommandRefusedError):
    """Refuse an argument that names nothing, or too much."""

    def __init__(self, why: str, do: str = "see gpulock status") -> None:
        super().__init__(why, do)


class Subject(NamedTuple):
    """What is asked about: a device, or a job with its task ("" for all), or a process."""

    device: Device | None = None
    job: str = ""
    task: str = ""
    pid: int = 0

    def owns(self, record: Owner) -> bool:
        """Return whether a record is of this job or process."""
        if self.pid:
            return record.scheduler == "process" and record.pid == self.pid
        if record.scheduler in ("process", "admin") or not self.job:
            return False
        # 12.1 may be the job 12 itself, which is no array
        return record.job_id == self.job and self.task in ("", record.task_id or "1")

    def query(self, **more: Any) -> ClaimQuery:
        """Return the question for claims of this job or process, or with this device."""
        if self.pid:
            return ClaimQuery(job=str(self.pid), scheduler="process", **more)
        if self.device is not None:
            return ClaimQuery(device=self.device.id, **more)
        return ClaimQuery(job=self.job, task=self.task, **more)

    def name(self) -> str:
        """Return the subject as people write it."""
        if self.device is not None:
            return f"GPU {self.device.label()}"
        if self.pid:
            return f"pid {self.pid}"
        return f"job {self.job}{'.' if self.task else ''}{self.task}"


def parse_subject(text: str, devices: Sequence[Device]) -> Subject:
    """Return what `text` names; a plain number is a device where there is one, else a job.

    `job 3`, `gpu 3` and `pid 3` leave no doubt. Raises SelectError.
    """
    text = text.strip()
    if not text or len(text) > NAME_CHARACTERS:
        raise SelectError("no such name")
    if match := PID.fullmatch(text):
        return Subject(pid=int(match[1]))
    if match := DEVICE.fullmatch(text):
        return Subject(device=match_one_device(match[1], devices))
    match = JOB.fullmatch(text)
    if match and (text.startswith("job") or not match_devices(text, devices)):
        return Subject(job=match[1].lstrip("0") or "0", task=match[2] or "")
    return Subject(device=match_one_device(text, devices))


def parse_job(text: str) -> Subject:
    """Return the job or process that `text` names; raise SelectError."""
    try:
        return parse_subject(text, ())
    except SelectError:
        why = f"{text.strip()[:NAME_CHARACTERS]!r} is no job"
        raise SelectError(why, "name a job: 12, 12.3 or pid 4711") from None


def parse_bare_pid(text: str) -> Subject:
    """Return what a number means that is of no job: the process whose claim status shows by it.

    Its `pid` is 0 where the text is no number.
    """
    text = text.strip()
    return Subject(pid=int(text) if text.isascii() and text.isdigit() else 0)


def match_one_device(text: str, devices: Sequence[Device]) -> Device:
    """Return the one device that `text` names; raise SelectError."""
    matching = match_devices(text, devices)
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise SelectError(f"no device {text!r} here")
    names = ", ".join(device.label() for device in matching)
    raise SelectError(f"{text} is several devices ({names})")


def match_device_list(text: str, devices: Sequence[Device]) -> list[Device]:
    """Return the devices of a list like `0,1`, each once; raise SelectError."""
    chosen: list[Device] = []
    for part in text.split(","):
        device = match_one_device(part.strip(), devices)
        if device in chosen:
            raise SelectError(f"{part.strip()} is given twice")
        chosen.append(device)
    return chosen


def match_devices(text: str, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that `text` may mean: index, bus id, or a UUID's beginning."""
    if not text or len(text) > NAME_CHARACTERS:
        return []
    if text.isascii() and text.isdigit():
        return [device for device in devices if device.index == int(text)]
    lower = text.lower()
    exact = [d for d in devices if lower in (d.id, d.label().lower(), d.uuid.lower())]
    if exact:
        return exact
    if parts := parse_lock_id(lower):
        bus, instance, _ = parts
        return [d for d in devices if d.bus == bus and instance in ("", d.id[len(bus) :])]
    if len(text) < LEAST_UUID:
        return []
    beginning = re.compile(f"([a-z]+-)?{re.escape(lower)}")  # with or without its `GPU-`
    return [d for d in devices if d.uuid and beginning.match(d.uuid.lower())]


def resolve_lock_id(name: str, devices: Sequence[Device]) -> str:
    """Return the lock id a name stands for, also of what the driver does not show (any more).

    That of a place on a card stands for this one alone. Raises SelectError.
    """
    parts = parse_lock_id(name.lower())
    if parts is not None and not match_devices(name, devices):
        return "".join(parts)
    return match_one_device(name, devices).id + (parts[2] if parts else "")


def resolve_device_id(name: str, devices: Sequence[Device]) -> str:
    """Return the id of the device a name stands for, of a place its card; raise SelectError."""
    return resolve_lock_id(name, devices).partition(SHARE)[0]


def parse_lock_id(text: str) -> tuple[str, str, str] | None:
    """Return (bus id as the kernel writes it, instance, share), or None for what is no lock id.

    The domain may be left out, or have eight digits as nvidia-smi writes it.
    """
    match = LOCK_ID.fullmatch(text)
    bus = match[1] if match else ""
    try:
        domain, number, slot, function = pci_bus_key(bus if bus.count(":") > 1 else f"0:{bus}")
    except ValueError:
        return None
    assert match
    return f"{domain:04x}:{number:02x}:{slot:02x}.{function:x}", match[2] or "", match[3] or ""
