# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: understood in full, or refused with file and line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.webconfig.config import load_web_config
from gpulock_exporter.webconfig.files import WebConfigError, WebConfigFiles

from tests.exporter.certificates import make_authority, make_certificate

HASH = "$2y$04$abcdefghijklmnopqrstuuKnoBx93AGbHF7nDfU33nIyjyfzG5jKi"
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
MUTUAL = f"{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
SECTIONS = "is not supported; supported are tls_server_config, basic_auth_users, http_server_config"
TLS_KEYS = (
    "is not supported; supported are cert_file, key_file, client_auth_type, client_ca_file,"
    " min_version"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("webconfig")
    authority = make_authority(made, "ca")
    make_certificate(made, "server", authority)
    make_certificate(made, "other", authority)
    key = (made / "server.key").read_text()
    locked = "openssl pkcs8 -topk8 -in server.key -passout pass:secret -out encrypted.key"
    subprocess.run(locked.split(), check=True, cwd=made)
    (made / "junk.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (made / "junk.key").write_text(key[:60] + "\n" + key[-40:])
    (made / "empty.pem").write_text("")
    (made / "large.pem").write_text("-----BEGIN CERTIFICATE-----\n" * 40_000)
    (made / "folder").mkdir()
    return made


def understood(folder: Path, text: str) -> tuple[WebSettings, list[str]]:
    path = folder / "web-config.yml"
    path.write_text(text, "latin-1")
    return load_web_config(str(path), WebConfigFiles())


WRONG: list[tuple[str, int, str]] = [
    # Not the format.
    ("tls_server_config: [\n", 2, "expected the node content"),
    ("- a\n", 1, "this file is not a mapping"),
    ("# one\nx: \xe4\n", 2, "this is no YAML: 'utf-8' codec"),
    ("a: b\nx: \x01\n", 2, "special characters are not allowed"),
    ("# fine\n\nx: [" + "[" * 1100, 1, "recursion"),
    ('basic_auth_users: {a: "\\U00110000"}\n', 1, "this is no YAML"),
    ("{1: 2}\n", 1, "1 is not supported"),
    ("? [a]\n: 1\n", 1, "a key is not a text"),
    ("basic_auth_users: &a\n  b: *a\n", 2, "b is not a text"),
    ("tls_server_config:\n", 1, "tls_server_config is not a mapping with at least one key"),
    ("tls_server_config: {}\n", 1, "tls_server_config is not a mapping with at least one key"),
    (TLS + TLS, 4, "tls_server_config comes twice"),
    (f"{TLS}  cert_file: other.pem\n", 4, "cert_file comes twice"),
    # Keys that the exporter-toolkit has and this exporter has not, or nobody.
    ("tls_config:\n  cert_file: x\n", 1, f"tls_config {SECTIONS}"),
    (f"{TLS}\nweb: 1\n", 5, f"web {SECTIONS}"),
    ("rate_limit:\n  interval: 1s\n  burst: 1\n", 1, f"rate_limit {SECTIONS}"),
    ("http_server_config:\n  headers: x\n", 2, "headers is not supported; supported are http2"),
    (f"{TLS}  cert: x\n", 4, f"cert {TLS_KEYS}"),
    (f"{TLS}  max_version: TLS12\n", 4, f"max_version {TLS_KEYS}"),
    (f"{TLS}  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", 4, "cipher_suites needs min_version"),
    (f"{TLS}  min_version: TLS12\n  cipher_suites: [A]\n", 5, "cipher_suites needs min_version"),
    (f"{TLS}  min_version: TLS13\n  cipher_suites: []\n", 5, "cipher_suites is not a list"),
    (f"{TLS}  min_version: TLS13\n  cipher_suites: [[A]]\n", 5, "cipher_suites is not a text"),
    (f"{TLS}  min_version: TLS13\n  cipher_suites: A\n", 5, "cipher_suites is not a list"),
    (f"{TLS}  min_version: [TLS13]\n", 4, "min_version is not a text"),
    (f"{TLS}  prefer_server_cipher_suites: true\n", 4, "prefer_server_cipher_suites is not"),
    (f"{TLS}  curve_preferences: [X25519]\n", 4, f"curve_preferences {TLS_KEYS}"),
    (f"{MUTUAL}  client_allowed_sans: [a]\n", 6, f"client_allowed_sans {TLS_KEYS}"),
    # Certificate and key.
    ("# one\ntls_server_config:\n  cert_file: server.pem\n", 3, "needs cert_file and key_file"),
    ("tls_server_config:\n  key_file: server.key\n", 2, "needs cert_file and key_file"),
    (TLS.replace("server.pem", ""), 2, "cert_file is not a text: write one, or leave it out"),
    (TLS.replace("server.pem", "''"), 2, "cert_file is not a text"),
    (TLS.replace("server.pem", "[a, b]"), 2, "cert_file is not a text"),
    (TLS.replace("server.pem", "gone.pem"), 2, "gone.pem: No such file or directory"),
    (TLS.replace("server.key", "gone.key"), 3, "gone.key: No such file or directory"),
    (TLS.replace("server.pem", "folder"), 2, "folder: Is a directory"),
    (TLS.replace("server.pem", "/dev/zero"), 2, "/dev/zero: this is not a regular file"),
    (TLS.replace("server.pem", "large.pem"), 2, "large.pem: this is larger than 1048576 bytes"),
    (TLS.replace("server.pem", '"a\\0b"'), 2, "this holds a NUL byte"),
    (TLS.replace("server.pem", "empty.pem"), 2, "holds no PEM certificate"),
    (TLS.replace("server.pem", "server.key"), 2, "holds no PEM certificate"),
    (TLS.replace("server.key", "server.pem"), 3, "holds no PEM private key"),
    (TLS.replace("server.pem", "junk.pem"), 2, "not usable"),
    (TLS.replace("server.key", "junk.key"), 2, "not usable"),
    (TLS.replace("server.key", "other.key"), 3, "not the key of the certificate"),
    (TLS.replace("server.key", "encrypted.key"), 3, "the key is encrypted"),
    # Client certificates, and the version.
    (f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n", 4, "needs client_ca_file"),
    (f"{TLS}  client_auth_type: VerifyClientCertIfGiven\n", 4, "needs client_ca_file"),
    (f"{TLS}  client_auth_type: RequireAnyClientCert\n", 4, "supported are NoClientCert, "),
    (f"{TLS}  client_ca_file: ca.pem\n", 4, "has no effect with client_auth_type NoClientCert"),
    (MUTUAL.replace("ca.pem", "junk.pem"), 4, "the client CA is not usable"),
    (f"{TLS}  min_version: TLS11\n", 4, "'TLS11' is not served: TLS12 or TLS13"),
    # Users.
    ("basic_auth_users:\n  alice: secret\n", 2, "alice has no bcrypt hash: htpasswd"),
    (f"basic_auth_users:\n  alice: {HASH}x\n", 2, "alice has no bcrypt hash"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$2y', '$2x')}\n", 2, "has no bcrypt hash"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$04', '$03')}\n", 2, "cost is 4 to 15"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$04', '$16')}\n", 2, "cost is 4 to 15"),
    (f"basic_auth_users:\n  'al:ice': {HASH}\n", 2, "no user name"),
    (f'basic_auth_users:\n  "al\\nice": {HASH}\n', 2, "no user name"),
    (f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n", 3, "a comes twice"),
]


@pytest.mark.parametrize(("text", "line", "words"), WRONG)
def test_a_mistake_is_refused_with_its_file_and_line(
    text: str, line: int, words: str, folder: Path
) -> None:
    with pytest.raises(WebConfigError, match=re.escape(words)) as caught:
        understood(folder, text)
    assert str(caught.value).startswith(f"{folder}/web-config.yml:{line}: ")
    assert HASH[10:] not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        *(("", ""), ("# nothing but a comment\n", ""), (TLS, ""), (MUTUAL, "")),
        (f"{TLS}  client_auth_type: NoClientCert\n  min_version: TLS13\n", ""),
        (f"{TLS}  min_version: TLS13\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", "no effect"),
        (f"{TLS}  min_version: TLS13\n  cipher_suites:\n  - A\n  - B\n", "no effect"),
        (MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"), ""),
        (f"{TLS}basic_auth_users:\n  alice: {HASH}\n  bob: {HASH.replace('2y', '2a')}\n", ""),
        (f"{TLS}  client_auth_type: RequestClientCert\n", "as NoClientCert does"),
        (f"basic_auth_users:\n  a: {HASH}\n", "in the clear"),
        ("http_server_config:\n  http2: true\n", "http2 has no effect, HTTP/1.0 alone is served"),
        (f"{TLS}basic_auth_users:\n  a: {HASH}\n  b: {HASH.replace('$04', '$05')}\n", "cost"),
    ],
)
def test_what_the_format_knows_is_understood_and_a_reservation_is_said(
    text: str, note: str, folder: Path
) -> None:
    settings, notes = understood(folder, text)
    assert (settings.tls is not None) == ("tls" in text)
    assert (settings.refusal is not None) == ("users" in text)
    assert [note in said for said in notes] == ([True] if note else [])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"gone\.yml:1: cannot be read: No such file"):
        load_web_config(str(tmp_path / "gone.yml"), WebConfigFiles())


@pytest.mark.parametrize(
    ("text", "missing", "words"),
    [
        ("# x\n", "yaml", "web-config.yml:1: this file needs PyYAML: pip install"),
        (f"basic_auth_users:\n  a: {HASH}\n", "bcrypt", "web-config.yml:2: basic_auth_users needs"),
    ],
)
def test_a_package_that_is_not_there_is_named_where_it_is_needed(
    text: str, missing: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(WebConfigError, match=re.escape(words)):
        understood(folder, text)


def test_what_is_not_configured_is_not_loaded(folder: Path) -> None:
    path = folder / "tls.yml"
    path.write_text(TLS)
    root = Path(__file__).resolve().parents[4]
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(root / 'exporter')!r}]\n"
        "import gpulock_exporter.web.server, gpulock_exporter.webconfig.reload as reload\n"
        "assert not {'yaml', 'bcrypt'} & {*sys.modules}, 'at import'\n"
        f"reload.Reloader({str(path)!r}, print)\n"
        "assert 'yaml' in sys.modules\n"
        "assert 'bcrypt' not in sys.modules, 'without users'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
