# SPDX-License-Identifier: Apache-2.0
"""execd's packed job: walked as it is laid out, and never anything but an answer or a refusal."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.sge import cull
from gpulock.sge.cull import LayoutError, SgeJob, parse_cull_job
from gpulock.simulate import execd
from gpulock.simulate.packed_job import PER_JOB, ResourceRequest
from tests.support.mutations import flip_bits

REAL = Path(__file__).parents[2] / "support/data/sge-8.1.9"
SAMPLES = [(REAL / f"{name}.job").read_bytes() for name in ("parallel", "array")]


def packed(*resources: ResourceRequest, **about: object) -> bytes:
    fields: dict[str, object] = {"job_id": 12, "command": ("/bin/true",), **about}
    return execd.pack_simulated_job(execd.SimulatedJob(resources=resources, **fields))  # type: ignore[arg-type]


def gpu(value: float) -> ResourceRequest:
    return ResourceRequest("gpu", value, str(value))


def survives(data: bytes) -> None:
    """Only a job or a LayoutError may come of any bytes."""
    try:
        found = parse_cull_job(data)
    except LayoutError:
        return
    assert isinstance(found, SgeJob)
    assert all(isinstance(value, float) for _, value, _ in found.requests)


def test_the_real_samples_say_what_was_asked_for() -> None:
    parallel, array = map(parse_cull_job, SAMPLES)
    assert (parallel.number, parallel.owner) == (4, "sgealice")
    assert parallel.requests == [("gpu", 2.0, 1), ("h_rt", 100.0, 0), ("gpuj", 1.0, 2)]
    assert (array.number, array.requests) == (5, [("gpu", 1.0, 1)])


@pytest.mark.parametrize("kind", [cull.ULONG, cull.DOUBLE])
def test_a_number_that_is_cut_short_is_none(kind: int) -> None:
    with pytest.raises(LayoutError, match="too early"):
        cull.CullReader(b"\0\0\2").value(kind)


@given(st.sampled_from(SAMPLES), st.data())
def test_flipped_bits_are_survived(sample: bytes, data: st.DataObject) -> None:
    survives(flip_bits(sample, data))


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_single_byte_may_be_wrong(sample: bytes) -> None:
    for at in range(0, len(sample)):
        for value in (0, 1, 0xFF):
            survives(sample[:at] + bytes([value]) + sample[at + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_file_cut_short_is_never_a_smaller_request(sample: bytes) -> None:
    whole = parse_cull_job(sample).requests
    for end in range(len(sample)):
        try:
            assert parse_cull_job(sample[:end]).requests == whole
        except LayoutError:
            continue


@given(st.binary(max_size=400))
def test_any_bytes_are_survived(data: bytes) -> None:
    survives(data)
    survives(SAMPLES[0][:8] + data)


@pytest.mark.parametrize("version", [0x10020001, 0x10010000, 0, 0xFFFFFFFF])
def test_another_version_of_grid_engine_is_refused(version: int) -> None:
    with pytest.raises(LayoutError, match="version"):
        parse_cull_job(SAMPLES[0][:4] + version.to_bytes(4, "big") + SAMPLES[0][8:])


def test_a_job_without_requests_has_none() -> None:
    assert parse_cull_job(packed()).requests == []


def test_bytes_of_the_user_that_look_like_a_request_are_not_one() -> None:
    """The whole resource list of another job, in this one's arguments, variables and names."""
    forged = SAMPLES[0][SAMPLES[0].index(b"qstat_l_requests") - 8 :]
    text = forged.replace(b"\0", b"\x01").decode("latin-1")
    about = {"command": ("/bin/echo", text), "variables": ((text, text),), "name": text[:500]}
    assert parse_cull_job(packed(**about)).requests == []
    assert parse_cull_job(packed(gpu(1), **about)).requests == [("gpu", 1.0, 1)]


def test_the_complexes_of_the_queue_are_not_the_jobs_requests() -> None:
    data = packed(gpu(2), pe="smp", hosts=(("node", 2),))
    assert b"slots\0" in data
    assert parse_cull_job(data).requests == [("gpu", 2.0, 1)]


def test_a_complex_asked_for_twice_is_told_twice() -> None:
    data = packed(gpu(1), ResourceRequest("gpu", 2, "2", PER_JOB))
    assert parse_cull_job(data).requests == [("gpu", 1.0, 1), ("gpu", 2.0, 2)]


@pytest.mark.parametrize("value", [1.5, -1.0, 1024.0, 1e300])
def test_values_are_told_as_they_stand(value: float) -> None:
    assert parse_cull_job(packed(gpu(value))).requests == [("gpu", value, 1)]


def test_names_that_are_no_text_survive() -> None:
    data = SAMPLES[0].replace(b"sgealice\0", b"sgealic\xff\0")
    assert parse_cull_job(data).owner == "sgealic\udcff"


def test_a_list_with_other_fields_is_not_guessed() -> None:
    count = cull.CE_COUNT.to_bytes(4, "big") + cull.CE_FIRST.to_bytes(4, "big")
    at = SAMPLES[0].index(count)
    with pytest.raises(LayoutError):
        parse_cull_job(SAMPLES[0][: at + 7] + b"\x85" + SAMPLES[0][at + 8 :])


def free_element(sample: bytes, fields: bytes, values: bytes) -> bytes:
    """Let the first request be an element that brings a descriptor of its own."""
    head = sample.index(b"qstat_l_requests\0") + len(b"qstat_l_requests\0") + 4
    first = head + 4 + 8 * cull.CE_COUNT
    bits = sample[first + 4 : first + 10]
    return sample[:first] + b"\0\0\0\1" + fields + bits + values + sample[first + 10 :]


@pytest.mark.slow
def test_a_field_that_takes_no_room_takes_no_time_and_no_memory() -> None:
    """200 references an element: 64 MiB of a list were 13 GB of nothing."""
    names = b"".join([b"\0\0\0\1\0\0\0\x0b"] * 200)
    head = b"\0\0\0\1" + (20_000).to_bytes(4, "big") + b"x\0" + bytes(4) + b"\0\0\0\xc8" + names
    reader = cull.CullReader(head + bytes(8) * 20_000)
    tracemalloc.start()
    try:
        assert reader.value(cull.LIST) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_request_with_fields_of_its_own_is_refused() -> None:
    one_string = b"\0\0\0\1" + (900).to_bytes(4, "big") + b"\0\0\0\x08"
    with pytest.raises(LayoutError):
        parse_cull_job(free_element(SAMPLES[0], one_string, b"gpu\0"))
    fifteen = cull.CE_COUNT.to_bytes(4, "big") + b"\0\0\0\1\0\0\0\x0b" * cull.CE_COUNT
    with pytest.raises(LayoutError):
        parse_cull_job(free_element(SAMPLES[0], fifteen, b""))
