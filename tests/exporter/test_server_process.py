# SPDX-License-Identifier: Apache-2.0
"""The server as a process, ended by a signal."""

from __future__ import annotations

import select
import signal
from pathlib import Path

import pytest

from tests.exporter.certificates import trusting, write_web_config
from tests.exporter.servers import LARGE, serving
from tests.exporter.wire import SOUND, dial
from tests.support.wait import let_work, wait_until


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_response_under_way_is_finished_after_sigterm(
    with_tls: bool, authority: Path, tmp_path: Path
) -> None:
    config = write_web_config(tmp_path, authority) if with_tls else None
    client = trusting(authority) if with_tls else None
    with serving(tmp_path, config, client=client, stop_seconds=60) as child:
        with dial(child.port, client, buffer=16384) as slow:
            slow.sendall(SOUND.replace(b"/metrics", b"/big"))
            received = slow.recv(1000)
            assert received.startswith(b"HTTP/1.0 200 ")
            child.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(child.port), why="the port to be closed")
            assert child.process.poll() is None
            while part := slow.recv(4096):
                if len(received) < LARGE - 100_000 <= len(received) + len(part):
                    let_work(1)  # all is written by now: the rest is the kernel's to deliver
                received += part
            header, _, body = received.partition(b"\r\n\r\n")
            assert len(body) == LARGE, header
        assert child.process.wait(60) == 0


def refuses(port: int) -> bool:
    try:
        dial(port).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        return False  # it stopped to listen while the kernel made this connection
    return False


def test_who_never_reads_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with (
        serving(tmp_path, stop_seconds=1, write_seconds=3600) as child,
        dial(child.port) as stuck,
    ):
        stuck.sendall(SOUND.replace(b"/metrics", b"/big"))
        assert select.select([stuck], [], [], 60)[0], "its answer has begun"
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(60) == 0
