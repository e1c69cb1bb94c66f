# SPDX-License-Identifier: Apache-2.0
"""Each parser that root runs on others' bytes: a value or its documented error, in bounded time.

docs/facts/inputs.md says who writes what. The quick suite tries few inputs, `make soak` a million
for each parser: any bytes, and real texts that were cut, doubled, mixed, and had odd words put in.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings  # noqa: TID251 (a count alone)
from hypothesis import strategies as st

from gpulock.daemon.core import sample
from gpulock.daemon.history.pending import read_record
from gpulock.daemon.mps.unit import read_control_log
from gpulock.daemon.slots.rsmap import next_rsmap, parse_complex_values
from gpulock.errors import Refusal
from gpulock.isolation.tree import parse_cgroup_path
from gpulock.job import environment
from gpulock.job.mps import LOGS
from gpulock.node.mounts import Mounts
from gpulock.node.procfs import Proc, parse_stat, parse_status
from gpulock.node.settings import Settings
from gpulock.report.scan import HistoryFaults, parse_history_line
from gpulock.sge.environment_file import rewrite_env_text
from gpulock.sge.request import count_gpus_by_kind
from gpulock.sge.spool import Spool, count_sge_job_hosts
from gpulock.sge.spooled_job import LayoutError, parse_spooled_job
from gpulock.slurm.call import SlurmHookCall, parse_stepd_title
from gpulock.slurm.job_cgroup import read_cgroup_paths
from gpulock.slurm.note import parse_task_note
from gpulock.slurm.scontrol import FIELDS, parse_squeue_row, slurm_array_task_name, slurm_job_uid
from gpulock.slurm.task_devices import Task
from gpulock.store import atomic, kv, owner
from gpulock.workstation.waiting import WaitingCaller, encode_waiting, read_waiting
from gpulock.workstation.wire import (
    CLAIM,
    SocketReply,
    SocketRequest,
    encode_packet,
    parse_reply,
    parse_request,
)
from tests.layers import HOT, WARM
from tests.support.mutations import WORDS, mixed, try_a_million
from tests.support.packed_job import REAL
from tests.support.trees import BOOT, bus, record

ROOT = Path(__file__).resolve().parents[3]
SGE = ROOT / "tests/support/data/sge-8.1.9"
LARGE = 1 << 18  # bytes of the long inputs
Reader = Callable[[bytes, Path], object]
HUNGRIEST = 200  # bytes of memory for each byte read


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def of_text(parse: Callable[[str], object]) -> Reader:
    """Return what reads bytes of a parser of texts."""

    def read(data: bytes, _: Path) -> object:
        return parse(text_of(data))

    return read


def of_bytes(parse: Callable[[bytes], object]) -> Reader:
    """Return what reads bytes of a parser that needs no folder."""

    def read(data: bytes, _: Path) -> object:
        return parse(data)

    return read


def environ_of(data: bytes) -> dict[str, str]:
    """Return bytes as an environment, as execve(2) can bring it."""
    pairs = [line.partition("=") for line in text_of(data.replace(b"\0", b"")).split("\n")]
    return {key: value for key, _, value in pairs}


def packed_job(data: bytes, _: Path) -> None:
    job = parse_spooled_job(data)
    settings = Settings({"SGE_COMPLEXES": "gpu card=model:*"})
    counted = count_gpus_by_kind(job, settings, "ocs1", 2)
    assert all(0 < number <= 2 * 4096 for _, number in counted)


def spooled_config(data: bytes, folder: Path) -> None:
    (folder / "config").write_bytes(data)
    (folder / "pe_hostfile").write_bytes(data)
    fd = os.open(folder, atomic.OPEN_DIRECTORY)
    try:
        spool = Spool(500, 1000, fd, str(folder), 0)
        assert spool.job.isdigit() and spool.need("job_owner").isprintable()
        assert spool.number("add_grp_id") >= 0
        assert count_sge_job_hosts(spool) >= 0
    finally:
        os.close(fd)


def complex_values(data: bytes, _: Path) -> None:
    for value in parse_complex_values(text_of(data)).values():
        assert next_rsmap(value, {}, ())[0] == value


def job_environment(data: bytes, _: Path) -> None:
    drop = environment.grant_variable_names(("SGE_GPU",))
    pairs = [("CUDA_VISIBLE_DEVICES", "2")]
    lines = rewrite_env_text(text_of(data), pairs, drop, "/d:/nvbin").encode(
        "utf-8", "surrogateescape"
    )
    masks = [one for one in lines.split(b"\n") if one.startswith(b"CUDA_VISIBLE_DEVICES=")]
    assert masks == [b"CUDA_VISIBLE_DEVICES=2"]
    assert all(len(one) <= 9998 for one in lines.split(b"\n"))


def process_files(data: bytes, folder: Path) -> None:
    """Let one process have the same bytes in each of its texts."""
    (folder / "7").mkdir(exist_ok=True)
    (folder / "7/cgroup").write_bytes(data)
    assert "" not in read_cgroup_paths(Proc(str(folder)), 7)
    assert "\n" not in parse_cgroup_path(text_of(data))
    job, step = parse_stepd_title(data)
    assert (not job and not step) or job.isdigit()


def mount_table(data: bytes, folder: Path) -> None:
    """Read which file systems there are from any table; `3` is open on mount 77."""
    for name in ("900/fd", "900/fdinfo", "self"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "900/fd/3").is_symlink():
        (folder / "900/fd/3").symlink_to("/dev/null")
        (folder / "900/fdinfo/3").write_text("pos:\t0\nmnt_id:\t77\n")
    (folder / "self/mountinfo").write_bytes(data)
    found = Mounts(str(folder)).key(900, str(folder / "900/fd"), "3")
    assert found in (None, (os.makedev(1, 3), 0, 0))


def process_status(data: bytes, _: Path) -> None:
    found = parse_status(data)
    assert len(found.uids) == 4  # a session below 0 counts as not told


def owner_record(data: bytes, _: Path) -> None:
    found = owner.parse_owner(text_of(data))
    assert found.job() and len(found.key()) == 5


def pending_record(data: bytes, folder: Path) -> None:
    (folder / "feedface").write_bytes(data)
    read_record(str(folder / "feedface"), "feedface")


def slurm_call(data: bytes, _: Path) -> None:
    call = SlurmHookCall(environ_of(data))
    assert call.job.isdigit() and "/" not in call.slurmd and len(call.positions()) < 100_000


def slurm_task(data: bytes, _: Path) -> None:
    task = Task(environ_of(data), "0")
    assert task.on_node >= 0


def squeue_row(data: bytes, _: Path) -> None:
    found = parse_squeue_row(data.decode("utf-8", "replace"))
    assert {*found} == {key for _, key in FIELDS}
    assert slurm_job_uid(found) >= -1
    slurm_array_task_name(found)


def socket_request(data: bytes, _: Path) -> None:
    found = parse_request(data)
    assert found.pid >= 0 and found.number <= 1024 and found.wait >= 0


def waiting_file(data: bytes, folder: Path) -> None:
    (folder / "waiting").write_bytes(data)
    proc = SimpleNamespace(running=lambda pid, start: pid >= start)
    node: Any = SimpleNamespace(store=SimpleNamespace(path=str(folder)), boot_id="b", proc=proc)
    for one in read_waiting(node):
        assert one.pid >= one.start


def mps_files(data: bytes, folder: Path) -> None:
    """Let the user of a card's MPS have the same bytes in its log and in its pid file."""
    (folder / LOGS).mkdir(exist_ok=True)
    (folder / LOGS / "control.log").write_bytes(data)
    said = read_control_log(str(folder))
    assert len(said) <= 200 and said.isprintable()


class Parser(NamedTuple):
    """What reads bytes, its documented errors, and samples of what it should read."""

    read: Reader
    errors: tuple[type[Exception], ...]
    samples: tuple[bytes, ...]


STAT = b"7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0\n"
STATUS = (
    b"Name:\tpython3\nState:\tS (sleeping)\nPPid:\t2\nUid:\t0\t0\t0\t0\n"
    b"Groups:\t4 65400 \nNSsid:\t7\nVmSize:\t  100 kB\n"
)
AMOUNTS = b"complex_values c=4(a b 0-1),\\\n d=2(x[y=z,u] v)\n"
CGROUP = b"12:devices,cpu:/slurm/uid_1000/job_12\n0::/system.slice/slurmstepd.scope/job_12\n"
CMDLINES = (b"slurmstepd: [12.batch]\0", b"-X\0a\0-m\0gpulock_exporter.app\0")
MOUNTS = (
    b"21 1 0:5 / / rw - ext4 /dev/vda rw\n77 21 0:6 / /dev rw,nosuid shared:2 - devtmpfs u rw\n"
)
OWNER = owner.encode_owner(record(token="feedface")).encode()
TASK_NOTE = (
    b"gpulock-task 1\nslurmd=n1\njob=12\nuid=1000\nrestart=0\ntoken=t\ndevices=0000:3b:00.0\n"
    b"indexes=0\nuuids=GPU-a\npositions=0\nbinds=\nrefused=\ncode=0\n"
)
SLURM = (
    b"SLURM_JOB_ID=12\nSLURM_JOB_UID=1000\nSLURMD_NODENAME=n1\nSLURM_CLUSTER_NAME=c\n"
    b"SLURM_JOB_GPUS=0,2-3\nSLURM_HET_JOB_ID=12\n"
)
STEP = b"SLURM_STEP_GPUS=0,1\nSLURM_GPUS_ON_NODE=2\n"
SQUEUE = b"".join([b"%-24s" % word for word in (b"12", b"1000", b"RUNNING", b"0", b"12", b"N/A")])
HISTORY = (
    b'{"version":1,"released_at":2.0,"claimed_at":1.0,"user":"a","gpus":1,"job_id":"12",'
    b'"token":"t","devices":[{"id":"x","held_seconds":1.0}],"shapes":{"x":{"width":1,"use":[1]}}}\n'
)
SAMPLE = f"{sample.SAMPLE_LINE}\nboot_id={BOOT}\ndevice 0000:3b:00.0 x.79=1 idle=2.5\n".encode()
WAITING = encode_waiting(
    [WaitingCaller(7, 99, 9, 1000, 5.0, "alice", "2 GPUs", "0 of 8; free")], "b"
)
REQUEST = encode_packet(SocketRequest(CLAIM, 4711, 99, 2, (bus(0), bus(1)), 60.0, "run"))
PARSERS = {
    "execd's packed job": Parser(
        packed_job,
        (LayoutError, Refusal),
        (*[path.read_bytes() for path in sorted(SGE.glob("*.job"))], REAL[12], REAL[14]),
    ),
    "config and pe_hostfile": Parser(
        spooled_config, (Refusal,), ((SGE / "parallel.config").read_bytes(),)
    ),
    "environment": Parser(job_environment, (), ((SGE / "array.environment").read_bytes(),)),
    "qconf -se": Parser(complex_values, (ValueError,), (AMOUNTS,)),
    "/proc/PID/stat": Parser(of_bytes(parse_stat), (ValueError,), (STAT,)),
    "/proc/PID/status": Parser(process_status, (ValueError,), (STATUS,)),
    "cgroup, cmdline": Parser(process_files, (), (CGROUP, *CMDLINES)),
    "mountinfo": Parser(mount_table, (), (MOUNTS,)),
    "owner": Parser(owner_record, (kv.MalformedError,), (OWNER,)),
    "pending record": Parser(pending_record, (kv.MalformedError, OSError), (OWNER,)),
    "task note": Parser(of_text(parse_task_note), (kv.MalformedError,), (TASK_NOTE,)),
    "Prolog's environment": Parser(slurm_call, (Refusal,), (SLURM,)),
    "task's environment": Parser(slurm_task, (Refusal,), (STEP,)),
    "squeue": Parser(squeue_row, (), (SQUEUE,)),
    "history": Parser(
        of_bytes(lambda line: parse_history_line(line, HistoryFaults())), (), (HISTORY,)
    ),
    "sample": Parser(
        of_text(lambda text: sample.parse_sample(text, sample.SAMPLE_LINE)),
        (kv.MalformedError,),
        (SAMPLE,),
    ),
    "note's number": Parser(of_text(kv.int_or_zero), (), (b"4711",)),
    "request at the socket": Parser(socket_request, (ValueError,), (REQUEST,)),
    "reply at the socket": Parser(
        of_bytes(parse_reply), (ValueError,), (encode_packet(SocketReply("granted")),)
    ),
    "MPS's log and pid file": Parser(mps_files, (), (b"[2026] Server 12 exited\n", b"4711\n")),
    "waiting": Parser(waiting_file, (), (WAITING,)),
}


def survives(parser: Parser, data: bytes, folder: Path) -> None:
    try:
        parser.read(data, folder)
    except parser.errors:
        return
    except Exception as fault:
        raise AssertionError(f"{fault!r} of {data[:2000]!r}") from fault


@pytest.mark.parametrize("name", PARSERS)
def test_any_bytes_are_a_value_or_the_documented_error(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, parser = tmp_path_factory.mktemp("bytes"), PARSERS[name]

    @settings(max_examples=20)
    @given(st.binary() | st.text().map(str.encode) | st.randoms(use_true_random=False))
    def check(given_: bytes | random.Random) -> None:
        data = given_ if isinstance(given_, bytes) else mixed(parser.samples, given_)
        survives(parser, data, folder)

    for one in parser.samples:
        parser.read(one, folder)
    check()


@pytest.mark.soak
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("name", PARSERS)
def test_a_million_inputs(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    try_a_million(parser.samples, lambda data: survives(parser, data, tmp_path))


@pytest.mark.slow
@pytest.mark.giant
@pytest.mark.parametrize("name", PARSERS)
def test_a_long_text_takes_memory_by_its_length(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    pieces = [*WORDS, *parser.samples, b"a=1\n", b"x\n", b"a" * 200 + b"=\n"]
    for piece in pieces:
        for head in (b"", parser.samples[0]):
            data = head + piece * (LARGE // len(piece))
            tracemalloc.start()
            try:
                survives(parser, data, tmp_path)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < HUNGRIEST * len(data), piece[:40]


def test_no_kernels_or_schedulers_text_is_cut_at_other_ends_than_its_own() -> None:
    """str.splitlines() cuts at form feeds and U+2028 too, which a user's path may have."""
    folders = [ROOT / "gpulock" / name.replace(".", "/") for name in (*HOT, *WARM)]
    found = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.glob("*.py")
        if ".splitlines(" in path.read_text()
    ]
    assert found == []
