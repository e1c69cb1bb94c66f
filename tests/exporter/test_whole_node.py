# SPDX-License-Identifier: Apache-2.0
"""The whole exporter on the double: what it tells, what it never tells, and to whom."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
from prometheus_client.parser import text_string_to_metric_families as text_of

from gpulock.store import owner
from gpulock.store.locks import LockStore
from tests.exporter.certificates import (
    make_authority,
    make_certificate,
    trusting,
    write_web_config,
)
from tests.exporter.whole import Scrape, Whole
from tests.exporter.wire import Answer, as_user
from tests.nvml.double import Double, Process
from tests.support.locks import place_lock
from tests.support.ports import ReservedPort
from tests.support.trees import record
from tests.support.wait import wait_until

SECRET = "hunter2-correct-horse"
LOOKED = "gpulock_sample_timestamp_seconds"
USER = 'o"h\\ {}=,#€\u2028'


def test_no_label_holds_a_command_an_environment_or_a_comment(tmp_path: Path) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", f"--password={SECRET}"],
        env={"TOKEN": SECRET},
    )
    with (
        stranger,
        Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml,
        Whole(tmp_path, nvml) as exporter,
    ):
        try:
            nvml.processes(1, [Process(stranger.pid, "512M")])
            nvml.set("gpu0.name", 'Tesla "V100" \\ {x="y"}')
            exporter.up(2)
            store = LockStore(str(nvml.node / "run/gpulock"))
            exporter.claim(1)  # the first one makes the folders
            exporter.release()
            bus = sorted(os.listdir(nvml.node / "proc/driver/nvidia/gpus"))[0]
            written = record(user=USER, queue='all"q\\n', comment=SECRET, spool_dir=f"/x/{SECRET}")
            place_lock(store, bus, written)
            assert SECRET in owner.encode_owner(written)
            found = exporter.wait_until(
                lambda s: s.all("gpulock_gpu_lock_info", gpu="0") and foreign(s)
            )
            assert found.one("gpulock_gpu_lock_info", gpu="0", user=USER, queue='all"q\\n') == 1
            assert found.all("gpulock_gpu_info", gpu="0", name='Tesla "V100" \\ {x="y"}') == [1]
            for path in ("/metrics", "/", "/-/healthy", "/nothing"):
                answer = exporter.get(path)
                assert SECRET not in answer.text and "time.sleep" not in answer.text
            for file in exporter.folder.rglob("*"):
                assert not file.is_file() or SECRET not in file.read_text()
        finally:
            stranger.kill()


def foreign(found: Scrape) -> float:
    return sum(found.all("gpulock_gpu_foreign_processes", gpu="1"))


FASTEST = 4  # RFC 1952, XFL: the compressor used its fastest algorithm
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/3.5.0",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Double]:
    """Eight H200, at work."""
    with Double(tmp_path_factory.mktemp("double"), preset="dgx-h200") as found:
        found.load(0, 60)
        yield found


def test_what_prometheus_asks_for_it_gets_over_tls_with_a_certificate_and_a_password(
    authority: Path, tmp_path: Path, nvml: Double
) -> None:
    make_certificate(authority.parent, "prometheus", authority, "DNS:prometheus.example.org")
    stranger = make_authority(tmp_path, "stranger")
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    config = write_web_config(
        tmp_path,
        authority,
        "  client_auth_type: RequireAndVerifyClientCert\n"
        f"  client_ca_file: {authority}\n"
        f"basic_auth_users:\n  prometheus: {hashed}\n",
    )
    client = trusting(authority, authority.with_name("prometheus.pem"))
    keys = {"WEB_CONFIG": str(config)}
    with Whole(tmp_path, nvml, settings=keys, client=client) as exporter:
        right = as_user("prometheus", "right")
        answer = first(exporter, right | PROMETHEUS)
        assert answer.status == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert answer.body[8] == FASTEST
        names = {family.name for family in text_of(gzip.decompress(answer.body).decode())}
        assert {"gpulock_nvml_up", "gpulock_gpu_energy_joules"} <= names
        assert exporter.get(headers=as_user("prometheus", "wrong")).status == 401
        assert exporter.get().status == 401
        for context in (trusting(authority), trusting(authority, signed_by(stranger))):
            exporter.client = context
            with pytest.raises(OSError):
                exporter.get(headers=right)


def signed_by(authority: Path) -> Path:
    return make_certificate(authority.parent, "impostor", authority, "DNS:prometheus.example.org")


def first(exporter: Whole, headers: dict[str, str]) -> Answer:
    """Return the first answer that has values of the driver."""
    found: list[Answer] = []

    def answered() -> bool:
        try:
            found[:] = [exporter.get(headers=headers)]
        except OSError:
            return False
        body = found[0].body
        zipped = found[0].headers.get("content-encoding") == "gzip"
        return b"gpulock_gpu_energy" in (gzip.decompress(body) if zipped else body)

    wait_until(answered, why=lambda: f"values of the driver\n{exporter.errors.read_text()}")
    return found[0]


@pytest.mark.attack
def test_a_user_who_has_the_port_first_keeps_the_exporter_from_no_sample(
    tmp_path: Path, nvml: Double
) -> None:
    """Tried: a user listens on one of the exporter's addresses before it starts.

    Stopped by: it samples all the same, says so, and listens once the address is free.
    """
    with (
        ReservedPort() as port,
        socket.create_server(("127.0.0.1", port.number)) as taken,
        Whole(tmp_path, nvml, "--listen", port.address) as exporter,
    ):
        sample = exporter.folder / "sample"
        wait_until(
            lambda: sample.exists() and "sequence=3" in sample.read_text(), why="its third sample"
        )
        one = f"answers on 127.0.0.1:{exporter.port}: cannot listen on {port.address}:"
        wait_until(lambda: one in exporter.errors.read_text(), why="one address alone")
        exporter.up(8)
        taken.close()
        both = f"127.0.0.1:{exporter.port} {port.address}"
        wait_until(lambda: f"answers on {both}\n" in exporter.errors.read_text(), why="both")
