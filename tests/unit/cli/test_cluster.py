# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: all nodes as Prometheus knows them, or why that is not known."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from gpulock_exporter.metrics.exposition import collect_families
from gpulock_exporter.metrics.families import LabelUser, render_families

from gpulock.cli import command_group
from gpulock.cli.session import CommandRefusedError
from gpulock.cli.status.cluster import QUERIES
from gpulock.cli.status.prometheus_api import query_prometheus
from gpulock.store.locks import Lock
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN, Verdict
from tests.support.exporter_nodes import Node, card, facts, instance, listed, lock
from tests.support.ports import ReservedPort
from tests.support.prometheus_server import Act, Prometheus, send
from tests.support.runner import command_runner, read_table
from tests.support.trees import FakeProc, bus

BUSY = {"utilization": 0.8, "busy": 0.8}
IDLE = {"utilization": 0.0, "busy": 0.0}
ONE, TWO, THREE = "gpu9:9465", "gpu10:9465", "gpu11.example.org:9465"
HOSTILE = "o\x1b[31mhno\n"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with Prometheus() as made:
        made.samples[QUERY] = [({"__name__": "up", "instance": "a:1"}, 1)]
        yield made


@pytest.fixture
def call(tmp_path: Path, prometheus: Prometheus) -> Any:
    config = tmp_path / "gpulock.conf"
    config.write_text(f"PROMETHEUS_URL={prometheus.url}\n")

    def run(*words: str) -> Result:
        return command_runner().invoke(
            command_group, ["--config", str(config), "status", "--cluster", *words]
        )

    return run


def held(number: int, token: str, user: str, **more: Any) -> Lock:
    return lock(number, token, user=user, **{"job_id": token, **more})


def three_nodes(prometheus: Prometheus, tmp_path: Path) -> None:
    """Have two nodes that are well, in all states between them, and one that is down."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(77)
    first = Node(gpus=4, idle_after=5)
    first.facts = facts(held(0, "11", "alice"), held(1, "11", "alice"), held(2, "12", "bob"))
    for _ in range(8):
        first.tick(card(0, **BUSY), card(1, **IDLE), card(2, **BUSY), card(3, **IDLE))
    write(prometheus, ONE, first, 4)
    second = Node(gpus=6, proc=str(proc.root))
    locks = [held(n, str(n), user) for n, user in enumerate(("carol", "dave", "erin"))]
    second.facts = facts(
        *locks,
        verdicts={
            "0": Verdict(DEAD, "gone"),
            "1": Verdict(UNKNOWN, "cannot be seen"),
            "2": Verdict(ALIVE, "runs"),
        },
    )
    second.facts.quarantined = {bus(3): "Xid 79"}
    for _ in range(3):
        second.tick(
            *(card(n, name="Tesla V100-SXM2-32GB", **BUSY) for n in range(4)),
            card(4, name="Tesla V100-SXM2-32GB", processes={77: None}, **BUSY),
        )
    write(prometheus, TWO, second, 5)
    prometheus.lose(THREE)


def write(
    prometheus: Prometheus, name: str, node: Node, devices: int, user: LabelUser = LabelUser.NAME
) -> None:
    found = node.snapshot([listed(number) for number in range(devices)])
    prometheus.scrape(name, render_families(collect_families(found, user)).decode())


def test_nodes_models_and_users_are_counted(
    call: Any, prometheus: Prometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_nodes(prometheus, tmp_path)
    result = call()
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    nodes = read_table(text, "NODE")
    assert list(nodes) == ["gpu9", "gpu10", "gpu11.example.org"]
    assert nodes["gpu9"] == {"GPUS": "4", "FREE": "1", "HELD": "2", "IDLE": "1", "UTIL": "40%"}
    assert nodes["gpu10"] == {
        **{"GPUS": "6", "FREE": "0", "HELD": "1", "IDLE": "0", "UTIL": "80%"},
        "OTHER": "1 missing, 1 quarantined, 1 stale, 1 unknown, 1 foreign",
    }
    assert nodes["gpu11.example.org"]["OTHER"] == "exporter down"
    models = read_table(text, "MODEL")
    assert list(models) == ["V100-SXM2-32GB", "H100 80GB HBM3"]
    assert models["H100 80GB HBM3"] == nodes["gpu9"]
    assert models["V100-SXM2-32GB"]["OTHER"] == "1 quarantined, 1 stale, 1 unknown, 1 foreign"
    users = read_table(text, "USER")
    assert list(users) == ["alice", "bob", "carol", "dave", "erin"]
    assert users["alice"] == {"GPUS": "2", "IDLE": "1", "UTIL": "40%", "JOBS": "1", "NODES": "1"}
    assert (
        "3 nodes, 10 GPUs: 1 free, 3 held, 1 held (idle), 1 foreign, 1 unknown, 1 stale, "
        "1 quarantined, 1 missing"
    ) in text
    assert "down  gpu11.example.org: Prometheus does not reach the exporter" in text
    monkeypatch.setenv("COLUMNS", "60")
    assert max(len(line) for line in call().stdout.splitlines()) <= 60


def test_free_lists_nodes_with_free_devices_alone_and_is_1_where_there_is_none(
    call: Any, prometheus: Prometheus, tmp_path: Path
) -> None:
    node = Node()
    node.facts = facts(held(0, "1", "alice"))
    node.tick(card(0))
    write(prometheus, "full:9465", node, 1)
    assert call("--free").exit_code == 1
    three_nodes(prometheus, tmp_path)
    result = call("--free")
    assert result.exit_code == 0
    assert list(read_table(result.stdout, "NODE")) == ["gpu9"]
    assert "MODEL" not in result.stdout and "down  gpu11" in result.stdout


def test_a_node_whose_driver_or_locks_do_not_answer_is_named(
    call: Any, prometheus: Prometheus
) -> None:
    deaf, blind = Node(), Node()
    deaf.tick(card(0))
    for _ in range(20):
        deaf.silence()
    write(prometheus, ONE, deaf, 1)
    blind.facts.locks = None
    blind.tick(card(0))
    write(prometheus, TWO, blind, 1)
    text = call().stdout
    assert "driver  gpu9: the driver does not answer the exporter" in " ".join(text.split("   "))
    assert "gpu10: the exporter cannot read the locks" in text
    assert read_table(text, "NODE")["gpu10"]["OTHER"] == "locks not readable"
    assert read_table(text, "NODE")["gpu9"]["GPUS"] == "1"


def test_an_instance_is_of_its_cards_model(call: Any, prometheus: Prometheus) -> None:
    node = Node()
    node.facts = facts(lock(0, "a" * 16, "gi1.ci0"))
    whole = card(0, mig=True, busy=None, observed=None, utilization=None)
    node.tick(whole, instance(0, 1), instance(0, 2))
    found = node.snapshot([listed(0, "gi1.ci0"), listed(0, "gi2.ci0")])
    prometheus.scrape(ONE, render_families(collect_families(found)).decode())
    text = call().stdout
    models = read_table(text, "MODEL")
    assert models == {
        "H100 80GB HBM3 1g.10gb": {"GPUS": "2", "FREE": "1", "HELD": "1", "IDLE": "0"}
    }
    assert "1 node, 2 devices: 1 free, 1 held" in text


def shared(prometheus: Prometheus) -> None:
    """Have alice two of four places on a card, with bob, who has another card, and carol a shard.

    Nobody but Slurm counts shards.
    """
    node = Node(shares=("0:4",))
    places = [(0, 1, "12", "alice", 4), (0, 2, "12", "alice", 4), (0, 3, "13", "bob", 4)]
    places += [(2, 1, "14", "carol", 0)]
    locks = [
        lock(card, f"{job}.{place}", f"share{place}", user=user, job_id=job, places=parted)
        for card, place, job, user, parted in places
    ]
    node.facts = facts(*locks, held(1, "15", "bob"))
    node.tick(card(0, **BUSY), card(1, **BUSY), card(2))
    write(prometheus, "[fe80::1]:9466", node, 3)


def test_a_share_counts_for_its_holder_as_its_part_of_the_gpu(
    call: Any, prometheus: Prometheus
) -> None:
    shared(prometheus)
    text = call().stdout
    assert list(read_table(text, "NODE")) == ["[fe80::1]:9466"], "a port of its own is kept"
    users = read_table(text, "USER")
    told = {name: (one["GPUS"], one["JOBS"], one["UTIL"]) for name, one in users.items()}
    assert told == {  # what all holders of a card do is none's own
        "bob": ("1.25", "2", "80%"),
        "alice": ("0.5", "1", "-"),
        "carol": ("-", "1", "-"),
    }


def held_series(prometheus: Prometheus, more: dict[str, Any], **own: str) -> None:
    """Have one device that is held, with `more` series of it."""
    labels = {"instance": ONE, "uuid": "u", "state": "held", **own}
    names = {"gpus": 1, "gpu_state": 1, **more}
    prometheus.samples[QUERIES[0]] += [
        ({"__name__": f"gpulock_{name}", **labels}, value) for name, value in names.items()
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_numbers_that_cannot_be_are_left_out(
    call: Any, prometheus: Prometheus, value: float
) -> None:
    held_series(
        prometheus, {"gpu_utilization_ratio": value, "gpus": value, "gpu_share_ratio": value}
    )
    held_series(prometheus, {}, instance="9" * 5000)
    result = call()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "locks not readable" in result.stdout and "-inf" not in result.stdout


def test_where_an_exporter_names_no_user_nobody_is_named(call: Any, prometheus: Prometheus) -> None:
    node = Node()
    node.facts = facts(held(0, "1", "alice"))
    node.tick(card(0))
    write(prometheus, ONE, node, 1, LabelUser.NONE)
    assert list(read_table(call().stdout, "USER")) == ["not told"]


def test_no_label_reaches_the_terminal_as_it_is(call: Any, prometheus: Prometheus) -> None:
    held_series(prometheus, {"gpu_lock_info": 1}, user=HOSTILE)
    text = call().stdout
    assert "\x1b" not in text and "o?[31mhno?" in text


def test_nothing_of_gpulock_is_said_as_such(call: Any) -> None:
    result = call()
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no series of gpulock within the last day" in result.stderr


# --- a server that is missing, broken, or something else ------------------------------------------

QUERY = "up"
NO_SERIES = b'{"status": "success", "data": {"resultType": "vector", "result": [{"metric": 7}]}}'
HUGE = b'{"status": "success", "data": {"result": [{"metric": {}, "value": [1, 1%0400d]}]}}' % 0


def refused(url: str, seconds: float = 10.0, limit: int = 1 << 20) -> str:
    with pytest.raises(CommandRefusedError) as caught:
        query_prometheus(url, [QUERY], seconds, limit)
    return str(caught.value)


def sends(raw: bytes) -> Act:
    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(raw)
        handler.close_connection = True

    return act


def answers(code: int, body: bytes, kind: str = "application/json", **headers: str) -> Act:
    return lambda handler: send(handler, code, body, kind, **headers)


def test_an_answer_is_its_series_and_no_proxy_of_the_environment_is_asked(
    prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    ((one,),) = query_prometheus(prometheus.url + "/", [QUERY])
    assert (one.name, one.labels, one.value) == ("up", {"instance": "a:1"}, 1.0)
    assert prometheus.asked[0][0].startswith("/api/v1/query?query=up&timeout=")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "PROMETHEUS_URL is not set"),
        ("prometheus:9090", "is no http:// or https:// address"),
        ("http://a:99999", "is no http:// or https:// address"),
        ("http://[::1", "is no http:// or https:// address"),
    ],
)
def test_what_is_no_address_is_refused_before_anybody_is_asked(url: str, said: str) -> None:
    assert said in refused(url)


def test_a_server_that_is_not_there_is_said() -> None:
    with ReservedPort() as port:
        text = refused(f"http://{port.address}")
    assert f"Prometheus at http://{port.address}: " in text and "refused" in text
    assert "PROMETHEUS_URL" in text
    with Prometheus() as plain:
        assert "SSL" in refused(plain.url.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (answers(200, b"<html><body>Login", "text/html"), "begins with '<html><body>Login'"),
        (answers(200, b"\xff\x00\x1b[2J"), "is not Prometheus's"),
        (answers(200, b"[" * 100_000), "is not Prometheus's"),
        (answers(200, b'{"status": "success", "data": 7}'), "is not Prometheus's"),
        (answers(200, NO_SERIES), "is not Prometheus's"),
        (answers(200, HUGE), "is not Prometheus's"),
        (answers(200, b" " * (1 << 21)), "longer than 1 MiB"),
        (
            answers(422, b'{"status": "error", "error": "too many samples\\u001b"}'),
            f"it answers 422 {HTTPStatus(422).phrase}: too many samples?",
        ),
        (answers(200, b'{"status": "error", "error": "no"}'), "it cannot answer: no"),
        (answers(404, b"not found", "text/plain"), "it answers 404 Not Found;"),
        (answers(302, b"", Location="file:///etc/passwd"), "it answers 302 Found;"),
        (sends(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{"), "it begins with '{'"),
        (sends(b"SSH-2.0-OpenSSH_9.2\r\n"), "SSH-2.0"),
    ],
)
def test_what_is_no_answer_is_said(prometheus: Prometheus, act: Act, said: str) -> None:
    prometheus.act = act
    text = refused(prometheus.url)
    assert said in text
    assert text.isprintable()


@pytest.mark.real_time
def test_a_server_that_never_answers_is_waited_for_no_longer_than_the_deadline(
    prometheus: Prometheus,
) -> None:
    over = threading.Event()

    def never(_: BaseHTTPRequestHandler) -> None:
        over.wait()

    prometheus.act = never
    try:
        assert "no answer within 0.3 s" in refused(prometheus.url, seconds=0.3)
    finally:
        over.set()


def test_a_password_goes_to_the_server_and_nowhere_else(prometheus: Prometheus) -> None:
    with Prometheus() as other:
        prometheus.act = answers(307, b"", Location=other.url)
        text = refused(prometheus.url.replace("http://", "http://who:s%40cret@"))
        token = base64.b64encode(b"who:s@cret").decode()
        assert prometheus.asked[0][1]["Authorization"] == f"Basic {token}"
        assert not other.asked
        assert "cret" not in text and f"{prometheus.url}: it answers 307" in text
