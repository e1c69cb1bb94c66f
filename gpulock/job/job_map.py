# SPDX-License-Identifier: Apache-2.0
"""Tell other exporters which job has which GPU, in their own files; off by default.

Hot, loaded where a site has set a folder. NVIDIA's dcgm-exporter reads JOB_MAP_DIR (a file a GPU
index, `<gpu>.<instance>` for MIG, one job id a line; a name with a dot in front is not read);
Princeton's nvidia_gpu_prometheus_exporter reads GPUSTAT_DIR (by UUID and by index: `JOB UID`).
A mapping never stops a job: what cannot be written is left, and `gpulock doctor` says so.
"""

import os

from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.node.settings import Settings
from gpulock.store import atomic
from gpulock.store.gate import Gate
from gpulock.store.locks import LockStore
from gpulock.store.owner import Owner


def write_job_map(node: Node, record: Owner, devices: list[Device], deadline: Deadline) -> None:
    """Write the files of a grant, where the site has set a folder for them.

    Those of a share need the gate. Where it stays shut, or no driver answers, the next claim or
    release of a place of the card writes them.
    """
    settings = node.settings
    shares = [device.id for device in devices if SHARE in device.id]
    if shares:
        try:
            found = node.devices()  # before the gate: such a read may never return
            with Gate(node.store, deadline):
                for name in shares:
                    write_shared_map(settings, node.store, found, name)
        except Refusal:
            return
        return
    for device in devices:
        for path, text in job_map_files(settings, record, device):
            try:
                atomic.replace_file(path, text.encode())
            except OSError:
                continue


def write_shared_map(
    settings: Settings, store: LockStore, devices: list[Device], share: str
) -> None:
    """Write anew who shares the card of a share, a line a job; the gate is held.

    GPUSTAT_DIR has room for one job a GPU, so that it has none of these.
    """
    card = share.partition(SHARE)[0]
    found = [device for device in devices if device.id == card]
    if not found or not settings.job_map_dir:
        return
    held = store.read_all_locks().items()
    jobs = [lock.owner.job() for name, lock in held if lock.owner and name.startswith(card + SHARE)]
    path = f"{settings.job_map_dir}/{job_map_name(found[0])}"
    try:
        atomic.replace_file(path, "".join([f"{job}\n" for job in jobs]).encode())
    except OSError:
        return


def clear_job_map(settings: Settings, record: Owner, devices: list[Device], name: str) -> None:
    """Empty the file of a device, and remove its GPUSTAT_DIR's, unless they are another job's.

    The gate is held. An empty file is renamed over: one that vanishes between the listing and the
    opening of dcgm-exporter fails its whole scrape. Before 4.4.0 an empty one hides its GPU.
    """
    found = [device for device in devices if device.id == name]
    if not found:
        return
    kept = f"{settings.job_map_dir}/{job_map_name(found[0])}"
    for path, text in job_map_files(settings, record, found[0]):
        try:
            if atomic.read_text(path) != text:
                continue
            if path == kept:
                atomic.replace_file(path, b"")
            else:
                os.unlink(path)
        except OSError:
            continue


def job_map_files(settings: Settings, record: Owner, device: Device) -> list[tuple[str, str]]:
    """Return (path, text) of each file that names a device's job."""
    place = job_map_name(device)
    found: list[tuple[str, str]] = []
    if settings.job_map_dir:
        found.append((f"{settings.job_map_dir}/{place}", f"{record.job()}\n"))
    if settings.gpustat_dir:
        text = f"{record.job_id} {record.uid}\n"
        names = [place, *([device.uuid] if device.uuid and "/" not in device.uuid else [])]
        found += [(f"{settings.gpustat_dir}/{name}", text) for name in names]
    return found


def job_map_name(device: Device) -> str:
    """Return `<index>`, or `<index>.<GPU instance>` of a MIG instance."""
    if not device.parent:
        return str(device.index)
    return f"{device.index}.{device.id.rpartition('.gi')[2].partition('.')[0]}"
