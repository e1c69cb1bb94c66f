# SPDX-License-Identifier: Apache-2.0
"""TLS as configured, with real handshakes: who gets in, by which version."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Generator
from pathlib import Path

import pytest
from gpulock_exporter.web.webconfig import load_web_config

from tests.exporter.certificates import (
    make_authority,
    make_certificate,
    make_expired,
    trusting,
)
from tests.exporter.servers import Running, running
from tests.exporter.wire import SOUND, dial, exchange, fetch

TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
VERIFIED = "  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    ours, foreign = make_authority(made, "ca"), make_authority(made, "foreign")
    make_certificate(made, "server", ours)
    make_certificate(made, "client", ours, "DNS:prometheus")
    make_certificate(made, "stranger", foreign, "DNS:prometheus")
    make_expired(made, "expired", ours)
    return made


def serving(folder: Path, more: str = "") -> Generator[Running]:
    path = folder / "web-config.yml"
    path.write_text(TLS + more)
    with running(settings=load_web_config(str(path))[0]) as server:
        yield server


@pytest.fixture
def server(folder: Path, request: pytest.FixtureRequest) -> Generator[Running]:
    yield from serving(folder, getattr(request, "param", ""))


def status(folder: Path, server: Running, client: str | None = None) -> int:
    """Get a page, showing a certificate; 0 when the handshake fails or the connection ends."""
    context = trusting(folder / "ca.pem", folder / f"{client}.pem" if client else None)
    try:
        return fetch(server.port, context=context, seconds=5).status
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError, http.client.BadStatusLine):
        return 0


@pytest.mark.parametrize(
    ("server", "statuses"),
    [
        ("", (200, 200, 200, 200)),
        ("  client_auth_type: NoClientCert\n", (200, 200, 200, 200)),
        (VERIFIED.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"),
         (200, 200, 0, 0)),
        (VERIFIED, (0, 200, 0, 0)),
    ],
    indirect=["server"],
)  # fmt: skip
def test_who_gets_in_by_client_auth_type(
    statuses: tuple[int, ...], folder: Path, server: Running
) -> None:
    clients = (None, "client", "stranger", "expired")
    assert tuple(status(folder, server, client) for client in clients) == statuses


@pytest.mark.parametrize("server", ["", "  min_version: TLS12\n"], indirect=True)
@pytest.mark.parametrize(
    ("offered", "spoken"),
    [(ssl.TLSVersion.TLSv1_3, "TLSv1.3"), (ssl.TLSVersion.TLSv1_2, "PROTOCOL_VERSION")],
)
def test_no_version_below_1_3_is_served(
    offered: ssl.TLSVersion, spoken: str, folder: Path, server: Running
) -> None:
    context = trusting(folder / "ca.pem")
    context.maximum_version = offered
    try:
        with dial(server.port, context) as one:
            assert isinstance(one, ssl.SSLSocket)
            assert one.version() == spoken
    except ssl.SSLError as error:
        assert spoken in str(error.reason)


def test_a_client_that_speaks_no_tls_gets_nothing(server: Running) -> None:
    with dial(server.port) as one:
        assert exchange(one, SOUND) == (b"", True)


def test_http2_is_not_agreed_on(folder: Path, server: Running) -> None:
    context = trusting(folder / "ca.pem")
    context.set_alpn_protocols(["h2", "http/1.1"])
    with dial(server.port, context) as one:
        assert isinstance(one, ssl.SSLSocket)
        assert one.selected_alpn_protocol() == "http/1.1"
