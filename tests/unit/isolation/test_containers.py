# SPDX-License-Identifier: Apache-2.0
"""A job's own bind lists: they stay its own, and whatever is in them, root decides the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.job import environment
from gpulock.job.environment import BIND_LISTS
from gpulock.sge import claim, environment_file, prolog, spool
from gpulock.store import owner
from tests.support import slurm_site
from tests.support.execd import SpooledJob
from tests.support.jobs import Site, child_of, gpus
from tests.support.trees import bus

RUN = 0
MASK = "CUDA_VISIBLE_DEVICES"
NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.5.1  Thu\n"
HOSTILE = (
    b"/a\nCUDA_VISIBLE_DEVICES=3",
    b"/a\nAPPTAINER_BINDPATH=/evil:/nvlib\nGPULOCK_DEVICES=GPU-x",
    b"/a\n=CUDA_VISIBLE_DEVICES=3",
    b"/a\r\x1b[2J\x00/b",
    b"/" + b"x" * 100_000,
    b"/x," * 33_333,
    b"../../../etc:/nvlib",
    b"/sets/../../../etc/shadow:/nvbin:rw",
    b"/dev:/dev:rw,/:/host:rw",
    b",,,:::,",
    b"\\",
    b"/\xff\xfe\xc3",
    b"${HOME}$(touch /tmp/x)`id`;id",
)


def sets(root: Path, driver: Path) -> tuple[dict[str, str], str]:
    """Put this node's driver version into a folder of sets; return the keys and the binds."""
    (driver / "version").write_text(NVIDIA)
    for part in ("bin", "lib"):
        (root / "sets/535.5.1" / part).mkdir(parents=True)
    folder = f"{root}/sets/535.5.1"
    return {"DRIVER_DIR": f"{root}/sets"}, f"{folder}/bin:/nvbin,{folder}/lib:/nvlib"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    child_of(monkeypatch, made)
    return made


def plant(job: SpooledJob, value: bytes) -> None:
    """Give a job bind lists of its own, byte for byte."""
    path = job.folder / "environment"
    lists = b"".join(name.encode() + b"=" + value + b"\n" for name in BIND_LISTS)
    path.write_bytes(path.read_bytes() + lists)


def lines_of(job: SpooledJob) -> list[bytes]:
    """Return the lines that the shepherd reads, none of which it would split."""
    lines = (job.folder / "environment").read_bytes().split(b"\n")
    assert max(len(line) for line in lines) <= environment_file.LONGEST_VARIABLE
    return lines


@pytest.mark.parametrize("value", HOSTILE)
def test_a_grid_engine_job_gets_the_same_gpus_and_variables_whatever_it_binds(
    site: Site, value: bytes
) -> None:
    keys, binds = sets(site.root, site.driver)
    job = site.run(gpus(2))
    plant(job, value)

    code = prolog.main(["sge", str(site.pid)], site.environ(job), site.config(**keys))

    assert (code, site.locks()) == (RUN, [bus(0), bus(1)])
    assert owner.parse_owner((job.folder / spool.RECORD).read_text()).devices == (bus(0), bus(1))
    ours = environment.grant_variable_names(claim.EXTRA_MASK_NAMES)
    for name in (*ours, *BIND_LISTS):
        found = [line for line in lines_of(job) if line.startswith(name.encode() + b"=")]
        assert len(found) == (name not in environment.OPTIONAL_VARIABLES), name
        if name in BIND_LISTS:
            assert found[0].endswith(binds.encode())
        elif name.endswith(MASK):
            assert found == [name.encode() + b"=0,1"]
    assert not [line for line in lines_of(job) if line.startswith(b"=")]


def test_a_slurm_prolog_notes_the_nodes_own_binds_whatever_its_environment_says(
    tmp_path: Path,
) -> None:
    site = slurm_site.Site(tmp_path)
    keys, binds = sets(site.root, site.driver)
    site.set(**keys)

    assert site.prolog(12, "0,1", **dict.fromkeys(BIND_LISTS, "/x:/nvlib\n")) == RUN

    assert site.note().binds == binds
    assert len(site.granted()) == 2
