# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: understood in full, or refused with file and line; TLS with real handshakes."""

from __future__ import annotations

import http.client
import re
import ssl
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.web.webconfig import WebConfigError, load_web_config

from tests.exporter.certificates import make_authority, make_certificate, trusting
from tests.exporter.servers import SOUND, Running, dial, exchange, fetch, running

HASH = "$2y$04$abcdefghijklmnopqrstuuKnoBx93AGbHF7nDfU33nIyjyfzG5jKi"
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
MUTUAL = f"{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("webconfig")
    authority = make_authority(made, "ca")
    make_certificate(made, "server", authority)
    make_certificate(made, "other", authority)
    make_certificate(made, "client", authority, "DNS:prometheus")
    make_certificate(made, "stranger", make_authority(made, "foreign"), "DNS:prometheus")
    locked = "openssl pkcs8 -topk8 -in server.key -passout pass:secret -out encrypted.key"
    subprocess.run(locked.split(), check=True, cwd=made)
    (made / "junk.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    return made


def understood(folder: Path, text: str) -> tuple[WebSettings, str]:
    path = folder / "web-config.yml"
    path.write_text(text, "latin-1")
    path.chmod(0o600)
    return load_web_config(str(path))


def test_a_file_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(WebConfigError, match=r"gone\.yml: .* No such file"):
        load_web_config(str(folder / "gone.yml"))


WRONG: list[tuple[str, str]] = [
    # Not the format.
    ("tls_server_config: [\n", "expected the node content"),
    ("- a\n", "this file is not a mapping"),
    *[(nothing, "this file is not a mapping") for nothing in ("''", "[]", "{}", "~")],
    *[(nothing, "it is empty: without TLS") for nothing in ("", "# all is commented out\n")],
    ("x: \xe4\n", "'utf-8' codec"),
    ("a: b\nx: \x01\n", "special characters are not allowed"),
    ("x: [" + "[" * 1100, "recursion"),
    ('"\\UFFFFFFFF": x\n', "this is no YAML"),
    ("{1: 2}\n", "1 is not supported"),
    ("basic_auth_users: &a\n  b: *a\n", "recursive"),
    ("tls_server_config:\n", "tls_server_config is not a mapping with at least one key"),
    (TLS + TLS, "a key comes twice"),
    # Keys that the exporter-toolkit has and this exporter has not, or nobody.
    ("tls_config:\n  cert_file: x\n", "this file: tls_config is not supported; there are tls_serv"),
    ("http_server_config:\n  headers: x\n", "http_server_config: headers is not supported"),
    (f"{TLS}  cert: x\n", "tls_server_config: cert is not supported; there are cert_file, key_"),
    (f"{TLS}  min_version: [TLS13]\n", "tls_server_config.min_version is not a text"),
    # Certificate and key.
    ("tls_server_config:\n  cert_file: server.pem\n", "needs cert_file and key_file"),
    ("tls_server_config:\n  key_file: server.key\n", "needs cert_file and key_file"),
    (TLS.replace("server.pem", ""), "tls_server_config.cert_file is not a text: write one"),
    (TLS.replace("server.pem", "gone.pem"), "No such file or directory: '{folder}/gone.pem'"),
    (TLS.replace("server.pem", '"a\\0b"'), "embedded null "),
    (TLS.replace("server.key", "other.key"), "{folder}/other.key: KEY_VALUES_MISMATCH"),
    (TLS.replace("server.key", "encrypted.key"), "tls_server_config.key_file is encrypted"),
    # Client certificates, and the version.
    (f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n", "needs client_ca_file"),
    (f"{TLS}  client_auth_type: RequireAnyClientCert\n", "supported are NoClientCert, "),
    (f"{TLS}  client_ca_file: ca.pem\n", "NoClientCert has no use for client_ca_file"),
    (MUTUAL.replace("ca.pem", "junk.pem"), "{folder}/junk.pem"),
    (f"{TLS}  min_version: TLS11\n", "'TLS11' is not served: TLS12 or TLS13"),
    # Users.
    ("basic_auth_users:\n  alice: secret\n", "basic_auth_users.alice has no bcrypt hash"),
    (f"basic_auth_users:\n  alice: {HASH}x\n", "alice has no bcrypt hash"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$2y', '$2x')}\n", "has no bcrypt hash"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$04', '$03')}\n", "of cost 4 to 15"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$04', '$16')}\n", "of cost 4 to 15"),
    (f"basic_auth_users:\n  'al:ice': {HASH}\n", "is no name"),
    (f'basic_auth_users:\n  "al\\nice": {HASH}\n', "is no name"),
    ("basic_auth_users:\n  cipher_suites: [a]\n", "basic_auth_users.cipher_suites is not a text"),
    ('"a\\nb": 1\n', "this file: a?b is not supported"),
    ('basic_auth_users:\n  "a\\nb": [1]\n', "basic_auth_users.a?b is not a text"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_mistake_is_refused_with_its_file_and_key(text: str, words: str, folder: Path) -> None:
    with pytest.raises(WebConfigError, match=re.escape(words.format(folder=folder))) as caught:
        understood(folder, text)
    assert str(caught.value).startswith(f"{folder}/web-config.yml: ")
    assert "\n" not in str(caught.value)
    assert HASH[10:] not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        *((TLS, ""), (MUTUAL, "")),
        (f"{TLS}  client_auth_type: NoClientCert\n  min_version: TLS13\n", ""),
        (f"{TLS}  min_version: TLS13\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", ""),
        (MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"), ""),
        (f"{TLS}basic_auth_users:\n  alice: {HASH}\n  bob: {HASH.replace('2y', '2a')}\n", ""),
        (f"basic_auth_users:\n  a: {HASH}\n", "in the clear"),
        ("http_server_config:\n  http2: true\n", ""),
    ],
)
def test_what_the_format_knows_is_understood_and_a_reservation_is_said(
    text: str, note: str, folder: Path
) -> None:
    settings, warning = understood(folder, text)
    assert (settings.tls is not None) == ("tls" in text)
    assert (settings.refusal is not None) == ("users" in text)
    assert note in warning and bool(note) == bool(warning)


@pytest.mark.parametrize(
    ("text", "missing", "words"),
    [
        ("# x\n", "yaml", "web-config.yml: this file needs PyYAML: python3-yaml"),
        (
            f"basic_auth_users:\n  a: {HASH}\n",
            "bcrypt",
            "web-config.yml: basic_auth_users needs bcrypt: python3-",
        ),
    ],
)
def test_a_package_that_is_not_there_is_named_where_it_is_needed(
    text: str, missing: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(WebConfigError, match=re.escape(words)):
        understood(folder, text)


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("web-config.yml", 0o644, "every user may read {}"),
        ("server.key", 0o644, "every user may read {}"),
        ("server.key", 0o666, "every user may write {}"),
        ("server.key", 0o640, ""),
        ("server.pem", 0o646, "every user may write {}"),
        ("server.pem", 0o644, ""),
        ("web-config.yml", 0o666, "every user may write {}"),
    ],
)
def test_a_file_that_everybody_may_write_or_a_key_that_all_may_read_is_told(
    folder: Path, name: str, mode: int, said: str
) -> None:
    understood(folder, f"{TLS}basic_auth_users:\n  a: {HASH}\n")
    before = (folder / name).stat().st_mode
    (folder / name).chmod(mode)
    try:
        _, warning = load_web_config(str(folder / "web-config.yml"))
    finally:
        (folder / name).chmod(before)
    assert warning == said.format(folder / name)


def test_what_is_not_configured_is_not_loaded(folder: Path) -> None:
    path = folder / "tls.yml"
    path.write_text(TLS)
    root = Path(__file__).resolve().parents[4]
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(root / 'exporter')!r}]\n"
        "import gpulock_exporter.web.server, gpulock_exporter.web.webconfig as config\n"
        "assert not {'yaml', 'bcrypt'} & {*sys.modules}, 'at import'\n"
        f"config.load_web_config({str(path)!r})\n"
        "assert 'yaml' in sys.modules\n"
        "assert 'bcrypt' not in sys.modules, 'without users'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def serving(folder: Path, text: str) -> Generator[Running]:
    path = folder / "web-config.yml"
    path.write_text(text)
    with running(settings=load_web_config(str(path))[0]) as server:
        yield server


@pytest.fixture
def server(folder: Path, request: pytest.FixtureRequest) -> Generator[Running]:
    yield from serving(folder, getattr(request, "param", TLS))


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
        (TLS, (200, 200, 200)),
        (MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"), (200, 200, 0)),
        (MUTUAL, (0, 200, 0)),
    ],
    indirect=["server"],
)
def test_who_gets_in_by_client_auth_type(
    statuses: tuple[int, ...], folder: Path, server: Running
) -> None:
    clients = (None, "client", "stranger")
    assert tuple(status(folder, server, client) for client in clients) == statuses


@pytest.mark.parametrize("server", [TLS, f"{TLS}  min_version: TLS12\n"], indirect=True)
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
