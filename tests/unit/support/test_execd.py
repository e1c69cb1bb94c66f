# SPDX-License-Identifier: Apache-2.0
"""The simulated execd against files of a real one (data/sge-8.1.9)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import execd, packed_job
from tests.support.packed_job import PER_JOB, ResourceRequest
from tests.support.pairs import zip_equal

REAL = Path(__file__).parents[2] / "support/data/sge-8.1.9"
SAMPLES = ("parallel", "array")


class PackedList(NamedTuple):
    """A list or object of a pack buffer: name and types, its rows, and its own bytes."""

    name: str
    descriptor: packed_job.Descriptor
    rows: list[list[Any]]
    data: bytes


class Reader:
    """Decode a pack buffer; written from the format, not from the encoder.

    Each list and object is packed again as it is read.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data), "cut short"
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        return (self.take(end - self.at) + self.take(1))[:-1].decode()

    def element(self, kinds: list[int], status: int = 2) -> list[Any]:
        assert (self.number(), self.number()) == (status, len(kinds))
        assert not any(self.take((len(kinds) + 7) // 8)), "a field is marked as changed"
        return [self.value(kind & 0xFF) for kind in kinds]

    def value(self, kind: int) -> Any:
        readers: dict[int, Callable[[], Any]] = {
            2: lambda: struct.unpack(">d", self.take(8))[0],
            **dict.fromkeys((3, 6), self.number),
            **dict.fromkeys((8, 12), self.text),
            **dict.fromkeys((9, 10), lambda: self.list(kind) if self.number() else None),
            11: lambda: None,
        }
        return readers[kind]()

    def list(self, kind: int) -> PackedList:
        """Read what follows the mark that a list (9) or an object (10) is there."""
        begin = self.at - 4
        count, name, changed = (
            (self.number(), self.text(), self.number()) if kind == 9 else (1, "", 1)
        )
        pairs = [(self.number(), self.number()) for _ in range(self.number())]
        status = 2 if kind == 9 else 8
        rows = [self.element([one for _, one in pairs], status) for _ in range(count)]
        data = self.data[begin : self.at]
        again = [dict(enumerate(map(packed, row))) for row in rows]
        assert changed == 1
        if kind == 9:
            assert packed_job.pack_list(name, pairs, *again) == data
        else:
            assert packed_job.pack_object(pairs, again[0]) == data
        return PackedList(name, pairs, rows, data)


def packed(value: Any) -> packed_job.Value:
    """Return a value as it is to be packed."""
    found: packed_job.Value = value.data if isinstance(value, PackedList) else value
    return found


def decode(data: bytes) -> dict[str, Any]:
    reader = Reader(data)
    assert (reader.number(), reader.number()) == (0, 0x10020000)
    fields = reader.element([kind for _, kind in packed_job.JOB_FIELDS])
    assert reader.at == len(data)
    return dict(zip_equal([name for name, _ in packed_job.JOB_FIELDS], fields))


def requests(job: dict[str, Any]) -> list[tuple[object, object, object, object]]:
    return [(row[0], row[3], row[4], row[6]) for row in job["hard_resource_list"].rows]


def pairs_of(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def a_job(**changes: object) -> execd.SimulatedJob:
    values: dict[str, object] = {"job_id": 4, "command": ("/bin/sleep", "4"), **changes}
    return execd.SimulatedJob(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_real_job_decoded_and_packed_again_is_the_same_bytes(sample: str) -> None:
    real = (REAL / f"{sample}.job").read_bytes()
    fields = decode(real)
    assert packed_job.pack_job({name: packed(fields[name]) for name in fields}) == real


def test_the_samples_say_what_was_asked_for() -> None:
    job = decode((REAL / "parallel.job").read_bytes())
    assert (job["job_number"], job["owner"], job["pe"]) == (4, "sgealice", "smp")
    assert requests(job) == [("gpu", "2", 2.0, 1), ("h_rt", "100", 100.0, 0), ("gpuj", "1", 1.0, 2)]


def test_a_packed_job_reads_back_as_it_was_given() -> None:
    asked = (ResourceRequest("gpu", 2.0, "2"), ResourceRequest("gpuj", 3.0, "3", PER_JOB))
    job = a_job(job_id=12, task_id=3, owner="alice", name="n", pe="smp", resources=asked)
    found = decode(execd.pack_simulated_job(job))
    assert (found["job_number"], found["job_name"], found["owner"]) == (12, "n", "alice")
    assert requests(found) == [("gpu", "2", 2.0, 1), ("gpuj", "3", 3.0, 2)]
    assert found["ja_tasks"].rows[0][0] == 3


def test_a_job_without_requests_has_no_resource_list() -> None:
    assert decode(execd.pack_simulated_job(a_job()))["hard_resource_list"] is None


@pytest.mark.parametrize("field", ["hard_resource_list", "env_list", "job_args", "ja_structure"])
def test_our_lists_have_the_names_and_types_of_real_ones(field: str) -> None:
    real = decode((REAL / "parallel.job").read_bytes())[field]
    resources = (ResourceRequest("gpu", 1.0, "1"),)
    ours = decode(execd.pack_simulated_job(a_job(resources=resources, variables=(("A", "b"),))))[
        field
    ]
    assert (ours.name, ours.descriptor) == (real.name, real.descriptor)


def test_our_task_list_has_the_types_of_a_real_one() -> None:
    real = decode((REAL / "parallel.job").read_bytes())["ja_tasks"]
    ours = decode(execd.pack_simulated_job(a_job()))["ja_tasks"]
    assert ours.descriptor == real.descriptor
    assert ours.rows[0][7].descriptor == real.rows[0][7].descriptor


@pytest.mark.parametrize("value", ["a\0b", "\0"])
def test_a_string_with_the_byte_that_ends_one_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="NUL"):
        packed_job.pack_string(value)


def test_a_field_that_jobs_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such"):
        packed_job.pack_job({"no_such": 1})


@pytest.mark.parametrize(
    ("job_id", "task_id", "path"),
    [
        (4, 0, "jobs/00/0000/0004.1"),
        (5, 3, "jobs/00/0000/0005.3"),
        (1234567, 2, "jobs/00/0123/4567.2"),
        (987654321, 1, "jobs/09/8765/4321.1"),
    ],
)
def test_the_packed_job_lies_where_execd_puts_it(job_id: int, task_id: int, path: str) -> None:
    assert execd.packed_job_path(job_id, task_id) == path


def test_a_spooled_job_has_the_files_of_a_real_one(tmp_path: Path) -> None:
    spooled = execd.spool_job(tmp_path, a_job(pe="smp", hosts=(("vm", 2),)))
    spool = tmp_path / "sge/spool/node"
    assert spooled.folder == spool / "active_jobs/4.1"
    assert spooled.job_file == spool / "jobs/00/0000/0004.1"
    assert decode(spooled.job_file.read_bytes())["job_number"] == 4
    hosts = (spooled.folder / "pe_hostfile").read_text()
    assert hosts == (REAL / "parallel.pe_hostfile").read_text()
    assert spooled.folder.stat().st_mode & 0o777 == 0o755
    assert (spooled.folder / "environment").stat().st_mode & 0o777 == 0o644


def test_a_job_that_is_spooled_already_is_not_overwritten(tmp_path: Path) -> None:
    spooled = execd.spool_job(tmp_path, a_job(name="first"))
    with pytest.raises(FileExistsError):
        execd.spool_job(tmp_path, a_job(name="second"))
    assert "job_name=first\n" in (spooled.folder / "config").read_text()


@pytest.mark.parametrize("kind", ["config", "environment"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_key_we_write_is_one_that_execd_writes(
    tmp_path: Path, sample: str, kind: str
) -> None:
    parallel = sample == "parallel"
    job = a_job(pe="smp" if parallel else "", task_id=0 if parallel else 3)
    ours = pairs_of((execd.spool_job(tmp_path, job).folder / kind).read_text())
    real = pairs_of((REAL / f"{sample}.{kind}").read_text())
    assert ours.keys() <= real.keys()
    for key in ("script_file", "pe", "ja_task_id", "njob_args", "SGE_TASK_ID", "NHOSTS"):
        assert ours.get(key) == real.get(key)


def test_a_parallel_job_counts_all_slots_and_those_of_this_host(tmp_path: Path) -> None:
    job = a_job(pe="mpi", hosts=(("here", 3), ("there", 5)))
    found = pairs_of((execd.spool_job(tmp_path, job).folder / "config").read_text())
    assert (found["pe_slots"], found["host_slots"], found["host"]) == ("8", "3", "here")


def test_a_variable_of_several_lines_stays_on_one(tmp_path: Path) -> None:
    job = a_job(variables=(("A", "one\ntwo\\n"),))
    text = (execd.spool_job(tmp_path, job).folder / "environment").read_text()
    assert text.splitlines()[0] == r"A=one\ntwo\\n"
