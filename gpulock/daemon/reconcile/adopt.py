# SPDX-License-Identifier: Apache-2.0
"""Put back the locks of living jobs when LOCK_DIR, or locks in it, were lost within a boot.

Warm. The records are the hooks' own, kept where only root writes: in the spool directory of each
Grid Engine job, and in STATE_DIR/runs for Slurm's and for `gpulock run`. Nothing is granted until
every living job was looked at; one that cannot be read stops the adoption. Where LOCK_DIR stands,
a lost lock is put back from its second name (store.locks), also of the dead: the reap judges it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap, place_device
from gpulock.sge.shepherds import find_shepherds
from gpulock.sge.spool import RECORD
from gpulock.slurm import note
from gpulock.slurm.call import expand_gpu_list
from gpulock.slurm.gres_map import resolve_gres_devices
from gpulock.store import adoption_state, atomic, claim_records, kv, owner
from gpulock.store.locks import GRANT, Lock
from gpulock.store.owner import Owner
from gpulock.store.verdicts import DEAD


def read_shepherd_record(node: Node, pid: int) -> Owner | None:
    """Return the record a shepherd's job was given, None for one that has no GPU."""
    try:
        path = f"{node.proc.root}/{pid}/cwd/{RECORD}"
        info = os.lstat(path)
        if info.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to uid {info.st_uid}, not to uid {os.geteuid()}")
        record = owner.parse_owner(atomic.read_text(path))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, kv.MalformedError) as fault:
        raise Refusal(
            UNKNOWN,
            f"what the job of shepherd {pid} holds cannot be read: {fault}",
            "wait for that job to end, or reboot",
        ) from fault
    if (record.boot_id, record.pid) != (node.boot_id, pid):
        return None
    marker = node.settings.simulation
    if marker and not record.spool_dir.startswith(f"{os.path.dirname(marker)}/"):
        return None  # of the real node, or of another simulation beside this one
    return record if node.proc.running(record.pid, record.start) else None


def read_run_records(node: Node) -> list[Owner]:
    """Return the records of Slurm jobs and of `gpulock run` of this boot; a reap judges them."""
    folder = f"{node.settings.state_dir}/{claim_records.FOLDER}"
    found: list[Owner] = []
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as fault:
        raise Refusal(UNKNOWN, f"{folder}: {fault.strerror}", "look at STATE_DIR") from fault
    for name in names:
        if name.startswith("."):
            continue  # of a write that was cut short: that run never started
        try:
            record = owner.parse_owner(atomic.read_text(f"{folder}/{name}"))
        except FileNotFoundError:
            continue
        except (OSError, kv.MalformedError) as fault:
            raise Refusal(
                UNKNOWN, f"{folder}/{name} cannot be read: {fault}", "remove it if no run is left"
            ) from fault
        if record.boot_id == node.boot_id:
            found.append(record)
    return found


def remember_grants(node: Node, judge: Judge, gone: Iterable[Lock], held: Collection[str]) -> None:
    """Give locks that are gone since the last reconcile with their second name that name again.

    Not where one in `held` overlaps it, nor one that was released, nor one of a dead Grid Engine
    job, of which that is not told. Gate held; raises Refusal or OSError.
    """
    store = node.store
    for lock in gone:
        record, place = lock.owner, f"{store.root}/{GRANT}{lock.id}"
        if record is None or any(lock_ids_overlap(lock.id, name) for name in held):
            continue
        if os.path.lexists(place) or was_released(node, record, lock.id):
            continue
        if record.scheduler != "sge" or judge.verdict(lock).state != DEAD:
            atomic.replace_file(place, owner.encode_owner(record).encode())


def was_released(node: Node, record: Owner, device: str) -> bool:
    """Return whether a claim's lock that is gone was released, also where its line is written."""
    state_dir = node.settings.state_dir
    if os.path.lexists(f"{node.store.released_dir}/{record.token}.{device}"):
        return True
    if record.scheduler not in ("slurm", "process"):
        return record.scheduler == "admin"  # who ends a reserve leaves nothing of it
    try:
        text = atomic.read_text(f"{state_dir}/{claim_records.FOLDER}/{record.token}")
        return device not in owner.parse_owner(text).devices
    except FileNotFoundError:
        return os.path.lexists(f"{state_dir}/{adoption_state.WHOLE}")
    except (OSError, kv.MalformedError):
        return False


def put_back_lost_locks(node: Node, judge: Judge, held: dict[str, Lock]) -> list[Owner]:
    """Make the locks again that somebody removed, gate held; return their records.

    `held` are all locks, and has those afterwards. A record has the devices that were put back.
    Tasks that share a lock come before its own record: cut short in between, it still is lost.
    Raises Refusal, or OSError.
    """
    store = node.store
    lost = store.find_lost(held)[0]
    for name in [name for name, lock in held.items() if lock.owner]:
        if not os.path.lexists(f"{store.root}/{GRANT}{name}"):
            store.keep(name)  # an earlier version made none, nor what was cut short
    if not lost:
        return []
    scan = judge.renew().scan  # who began since `judge` looked is seen as well
    require_processes_seen(scan)
    found: dict[str, list[Owner]] = {}
    shepherds = [read_shepherd_record(node, pid) for pid in find_shepherds(scan, os.geteuid())]
    for name in lost:
        atomic.mkdir_if_missing(f"{store.locks_dir}/{name}")
        try:
            record = owner.parse_owner(atomic.read_text(f"{store.root}/{GRANT}{name}"))
        except (OSError, kv.MalformedError):
            record = None  # its lock will be one that cannot be read, which nobody reaps
        for one in shepherds:
            if record and one and (one.token, one.run()) == (record.token, record.run()):
                continue
            if record and one and one.token == record.token:
                store.anchor(name, one.pid, one.start, one.add_grp_id)
        os.link(f"{store.root}/{GRANT}{name}", f"{store.locks_dir}/{name}/owner")
        held[name] = store.read(name)
        if record:
            found.setdefault(record.token, []).append(record.copy(devices=(name,)))
    return [same[0].copy(devices=tuple(one.devices[0] for one in same)) for same in found.values()]


def require_processes_seen(scan: ProcessScan) -> None:
    """Raise Refusal(UNKNOWN) where living jobs may be hidden."""
    scan.statuses()
    if scan.blind:
        raise Refusal(UNKNOWN, scan.blind, "run gpulock reap where all processes show")


def adopt_lost_locks(node: Node, scan: ProcessScan) -> list[Owner]:
    """Lock again what living jobs hold, gate held; return the records that were put back.

    Several shepherds of one grant (tasks of a parallel job) give one lock with anchors. A lock
    without owner is left by an adoption that was cut short.
    """
    adopted: dict[str, Owner] = {}
    known = {device.id: device for device in node.known_devices() or node.devices()}
    # of our own uid: another user's process of that name must not steer what root restores
    kept = [read_shepherd_record(node, pid) for pid in find_shepherds(scan, os.geteuid())]
    living = [record for record in [*kept, *read_run_records(node)] if record is not None]
    # of two records that name one device the later one holds it: the earlier is a leftover
    living.sort(key=lambda one: -one.claimed_boottime)
    for record in living:
        first = adopted.setdefault(record.token, record)
        for device in record.devices:
            if first is not record:
                node.store.anchor(device, record.pid, record.start, record.add_grp_id)
                continue
            card = place_device(known, device)
            own = record.copy(uuid=card.uuid, minor=str(card.minor)) if card else record
            try:
                node.store.make(device, own)
            except FileExistsError:
                held = node.store.read(device)
                if held.owner is None and not held.fault:
                    node.store.rewrite(device, own)
    for record in reversed(adopted.values()):
        if record.scheduler == "slurm":
            try:
                note.write_task_note(node.store, build_adopted_slurm_note(node, record, known))
            except Refusal:
                continue  # its later steps find no note, and do not start
    return list(adopted.values())


def check_records_complete(node: Node) -> None:
    """Raise Refusal where a claim of this boot may be without its record: who lives is not known.

    What is missing is missing in LOCK_DIR as well by now; nobody but people can tell.
    """
    state_dir = node.settings.state_dir
    for name in (adoption_state.PARTIAL, adoption_state.REPAIRING):
        if os.path.lexists(f"{state_dir}/{name}"):
            raise Refusal(
                UNKNOWN,
                "claims of this boot have no record, because STATE_DIR was full",
                f"reboot, or remove {state_dir}/{name} when no job is left on this node",
            )


def write_missing_records(node: Node) -> None:
    """Write the records for which there was no room; gate held, so that no lock goes meanwhile.

    A claim that finds no room meanwhile notes that again: then what was whole is not.
    """
    state_dir = node.settings.state_dir
    try:
        adoption_state.begin_record_repair(state_dir)
    except OSError:
        return  # the next reconcile tries again
    held: dict[str, Owner] = {}
    for lock in node.store.read_all_locks().values():
        record = lock.owner
        if record is None or record.scheduler not in ("slurm", "process"):
            continue
        if record.boot_id == node.boot_id:
            before = held[record.token].devices if record.token in held else ()
            held[record.token] = record.copy(uuid="", minor="", devices=(*before, lock.id))
    try:
        for token, record in held.items():
            if not os.path.lexists(f"{state_dir}/{claim_records.FOLDER}/{token}"):
                claim_records.write_claim_record(state_dir, record)
    except OSError:
        return
    adoption_state.rename_adoption_state(state_dir, adoption_state.WHOLE, adoption_state.REPAIRING)


def build_adopted_slurm_note(node: Node, record: Owner, known: dict[str, Device]) -> note.TaskNote:
    """Return what the later steps of an adopted Slurm job are to be told; raise Refusal."""
    found = note.TaskNote(record.slurmd, record.job_id, record.uid, record.restart)
    found.token = record.token
    found.positions = expand_gpu_list(record.positions) if record.positions else []
    found.binds = environment.driver_binds(node.settings)
    cards = [card for name in record.devices if (card := place_device(known, name))]
    if len(cards) != max(len(record.devices), len(found.positions)):
        raise Refusal(BROKEN, f"job {record.job_id} lost a device", "see gpulock status")
    if found.positions and node.settings.slurm_device_selection == "slurm":
        cards = resolve_gres_devices(node.settings.state_dir, found.positions, cards)
    found.devices = cards
    return found
