# SPDX-License-Identifier: Apache-2.0
"""gpulock-exporter as a program: what it tells, what it never tells, to whom, and how it ends."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
from gpulock_exporter.app.program import apply_exporter_options, exporter_parser, worker_command
from prometheus_client.parser import text_string_to_metric_families as text_of

from gpulock.daemon.core.sample import read_finished_claim
from gpulock.node.settings import Settings, parse_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store import owner
from gpulock.store.locks import LockStore
from tests.exporter.certificates import make_authority, make_certificate, trusting, write_web_config
from tests.exporter.servers import Answer, as_user
from tests.exporter.whole import PROGRAM, ROOT, UTILISATION, Scrape, Whole
from tests.nvml.double import Double, Process
from tests.support.locks import place_lock
from tests.support.ports import ReservedPort
from tests.support.trees import record
from tests.support.wait import wait_until

SECRET = "hunter2-correct-horse"
USER = 'o"h\\ {}=,#€\u2028'


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[Double]:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as found:
        yield found


@pytest.fixture
def exporter(tmp_path: Path, nvml: Double) -> Iterator[Whole]:
    with Whole(tmp_path, nvml, settings=SHORT) as found:
        found.up(2)
        yield found


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
            token = exporter.claim(1)  # the first one makes the folders
            exporter.wait_until(lambda s: s.all("gpulock_gpu_lock_info", gpu="1"))
            exporter.release()
            left = wait_until(
                lambda: read_finished_claim(str(exporter.folder), token), why="the claim's account"
            )
            assert [*left.tokens] == [token], "gpulockd writes the history from it"
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


def test_what_prometheus_asks_for_it_gets_over_tls_with_a_certificate_and_a_password(
    authority: Path, tmp_path: Path, nvml: Double
) -> None:
    name = "DNS:prometheus.example.org"
    make_certificate(authority.parent, "prometheus", authority, name)
    impostor = make_certificate(tmp_path, "impostor", make_authority(tmp_path, "stranger"), name)
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
        for context in (trusting(authority), trusting(authority, impostor)):
            exporter.client = context
            with pytest.raises(OSError):
                exporter.get(headers=right)


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
        exporter.up(2)
        taken.close()
        both = f"127.0.0.1:{exporter.port} {port.address}"
        wait_until(lambda: f"answers on {both}\n" in exporter.errors.read_text(), why="both")


ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"}
SHORT = {"SAMPLE_PERIOD": "0.2"}
SUCCESS = "gpulock_collector_success"
FULL = """
import errno, gpulock.store.atomic
def write_descriptor(fd, data):
    raise OSError(errno.ENOSPC, "No space left on device")
gpulock.store.atomic.write_descriptor = write_descriptor
"""
DEAF = """
from gpulock_exporter.app import program
def die(self):
    raise MemoryError("cannot accept")
program.HttpServer._run = die
"""


def call(config: Path, *words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, "-c", before + PROGRAM, "--config", str(config), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def configured(root: Path, *lines: str) -> Path:
    """Return the settings of a simulated node, with these lines behind its own."""
    config = write_simulated_node(root / "node", "dgx1").config
    config.write_text("\n".join([config.read_text(), *lines]) + "\n")
    return config


def settings_of(*lines: str) -> Settings:
    return parse_settings("\n".join(lines), "the.conf")


def test_an_exporter_without_room_for_its_files_serves_without_them_and_names_one(
    tmp_path: Path, nvml: Double
) -> None:
    with Whole(tmp_path, nvml, settings=SHORT, before=FULL) as exporter:
        found = exporter.wait_until(lambda s: s.all(UTILISATION))
        assert found.one(SUCCESS, collector="files") == 0
    where = f"[Errno 28] No space left on device: '{exporter.folder}/sample'"
    assert f"gpulock-exporter: files: {where}\n" in exporter.errors.read_text()


def test_an_exporter_that_is_killed_goes_on_where_it_was(exporter: Whole) -> None:
    observed = "gpulock_gpu_observed_seconds_total"
    counted = exporter.wait_until(lambda s: min(s.all(observed), default=0.0) > 3).totals()
    exporter.process.kill()
    exporter.process.wait()
    exporter.start()
    after = exporter.wait_until(lambda s: s.totals().keys() >= counted.keys()).totals()
    assert {key for key, value in counted.items() if after[key] < value} == set()


def test_a_folder_that_is_removed_is_made_again_and_held(exporter: Whole) -> None:
    exporter.process.send_signal(signal.SIGHUP)  # which ends none that no terminal runs
    shutil.rmtree(exporter.folder)
    wait_until((exporter.folder / "inventory").exists, why="what is written last")
    assert (exporter.folder / "sample").read_text().startswith("gpulock-sample 1\n")
    exporter.wait_until(lambda s: s.all(SUCCESS, collector="files") == [1])
    being_written = exporter.folder / ".sample.0a1b"
    being_written.touch()
    done = call(exporter.config, "--listen", "127.0.0.1:0")
    assert (done.returncode, being_written.exists()) == (3, True), "it is held as before"
    assert done.stderr == (
        f"gpulock-exporter: another gpulock-exporter writes {exporter.folder}; "
        "give this one a folder of its own (--folder)\n"
    )
    assert exporter.get("/-/healthy").text == "gpulock-exporter is healthy\n"


def test_where_a_service_manager_makes_the_folder_an_exporter_without_it_ends(
    tmp_path: Path, nvml: Double
) -> None:
    (tmp_path / "run").mkdir()
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "90000000"}
    own = {**SHORT, "LOCK_DIR": str(tmp_path / "run/gpulock")}
    with Whole(tmp_path, nvml, settings=own, env={**nvml.env, **told}) as exporter:
        exporter.up(2)
        (tmp_path / "run").rename(tmp_path / "away")
        exporter.ends = (3,)
        assert exporter.process.wait(60) == 3
        said = exporter.errors.read_text()
        assert said.endswith(f"gpulock-exporter: {tmp_path}/run/gpulock-exporter is gone\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("GUPS=8", "unknown key 'GUPS'; correct the file"),
        ("SAMPLE_PERIOD=30", "SAMPLE_PERIOD is 30, and the driver keeps 16 s"),
        ("WEB_CONFIG=/etc/hostname", "gpulock-exporter: /etc/hostname: this file is not a mapping"),
    ],
)
def test_what_is_not_obeyed_is_told(tmp_path: Path, line: str, said: str) -> None:
    done = call(configured(tmp_path, line), "--listen", "nowhere")
    assert (done.returncode, said in done.stderr) == (3, True)
    assert ("SAMPLE_PERIOD" in done.stderr) is line.startswith("SAMPLE")


def test_an_exporter_that_accepts_nobody_any_more_ends_so_that_it_is_started_again(
    tmp_path: Path,
) -> None:
    done = call(configured(tmp_path), "--listen", "127.0.0.1:0", before=DEAF)
    assert done.returncode == 3
    assert "MemoryError: cannot accept" in done.stderr


def test_an_option_counts_before_the_file_and_the_file_before_the_default() -> None:
    lines, words = ("EXPORTER_LISTEN=:1 :2", "LOCK_DIR=/d"), ["--listen", ":3", "--folder", "/e"]
    found = [
        apply_exporter_options(settings_of(*said), exporter_parser().parse_args(given))
        for said, given in (((), []), (lines, []), (lines, words))
    ]
    assert [(one.exporter_listen, one.exporter_dir) for one in found] == [
        ((":9465",), "/run/gpulock-exporter"),
        ((":1", ":2"), "/d-exporter"),
        ((":3",), "/e"),
    ]


def test_the_worker_looks_as_often_as_the_settings_say() -> None:
    assert worker_command(settings_of())[-3:] == ["1.0", "10.0", "nvml"]
    own = worker_command(settings_of("SAMPLE_PERIOD=0.5", "SIMULATION=/n/marker"))
    assert own[-3:] == ["0.5", "5.0", "simulated:/n"]
