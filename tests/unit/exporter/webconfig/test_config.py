# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: understood in full, or refused with file and line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from gpulock_exporter.web.response import HttpRequest
from gpulock_exporter.webconfig.config import WebConfig, load_web_config
from gpulock_exporter.webconfig.files import WebConfigError, WebConfigFiles

from tests.exporter.certificates import make_authority, make_certificate

HASH = "$2y$04$abcdefghijklmnopqrstuuKnoBx93AGbHF7nDfU33nIyjyfzG5jKi"
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
MUTUAL = f"{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    made = tmp_path_factory.mktemp("webconfig")
    authority = make_authority(made, "ca")
    make_certificate(made, "server", authority)
    make_certificate(made, "other", authority)
    key = (made / "server.key").read_text()
    (made / "encrypted.key").write_text(encrypted(made / "server.key"))
    (made / "junk.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (made / "junk.key").write_text(key[:60] + "\n" + key[-40:])
    (made / "empty.pem").write_text("")
    (made / "folder").mkdir()
    yield made
    shutil.rmtree(made)


def encrypted(key: Path) -> str:
    command = ["openssl", "pkcs8", "-topk8", "-in", str(key), "-passout", "pass:secret"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def understood(folder: Path, text: str) -> WebConfig:
    path = folder / "web-config.yml"
    path.write_text(text)
    return load_web_config(str(path), WebConfigFiles())


WRONG: list[tuple[str, int, str]] = [
    # Not the format.
    ("tls_server_config: [\n", 2, "expected the node content"),
    ("- a\n", 1, "not a mapping"),
    ("just words\n", 1, "not a mapping"),
    ("a: 1\n---\nb: 2\n", 2, "but found another document"),
    ("\tx: 1\n", 1, "found character"),
    ("x: \x01\n", 1, "special characters are not allowed"),
    ("# fine\n\nx: [" + "[" * 3000, 1, "nested too deeply"),
    ("tls_config:\n  cert_file: x\n", 1, "tls_config is not known here; known are tls_server"),
    (f"{TLS}\nweb: 1\n", 5, "web is not known here"),
    ("{1: 2}\n", 1, "1 is not known here"),
    ("? [a]\n: 1\n", 1, "a key is a string"),
    ("basic_auth_users: &a\n  b: *a\n", 1, "a list or a mapping"),
    ("tls_server_config:\n", 1, "tls_server_config is a mapping with at least one key"),
    ("tls_server_config: {}\n", 1, "tls_server_config is a mapping with at least one key"),
    ("tls_server_config: yes\n", 1, "tls_server_config is a mapping"),
    (TLS + TLS, 4, "tls_server_config comes twice"),
    (f"{TLS}  cert_file: other.pem\n", 4, "cert_file comes twice"),
    # Certificate and key.
    (
        "# only one\ntls_server_config:\n  cert_file: server.pem\n",
        2,
        "needs cert_file and key_file",
    ),
    ("tls_server_config:\n  key_file: server.key\n", 1, "needs cert_file and key_file"),
    ("tls_server_config:\n  client_auth_type: NoClientCert\n", 1, "needs cert_file and key_file"),
    (TLS.replace("server.pem", ""), 2, "cert_file has no value"),
    (TLS.replace("server.pem", "''"), 2, "cert_file is empty"),
    (TLS.replace("server.pem", "[a, b]"), 2, "cert_file is a string"),
    (TLS.replace("server.pem", "gone.pem"), 2, "gone.pem: No such file or directory"),
    (TLS.replace("server.key", "gone.key"), 3, "gone.key: No such file or directory"),
    (TLS.replace("server.pem", "folder"), 2, "folder: this is not a regular file"),
    (TLS.replace("server.pem", "/dev/zero"), 2, "/dev/zero: this is not a regular file"),
    (TLS.replace("server.pem", '"a\\0b"'), 2, "embedded null byte"),
    (TLS.replace("server.pem", "empty.pem"), 2, "holds no PEM certificate"),
    (TLS.replace("server.pem", "server.key"), 2, "holds no PEM certificate"),
    (TLS.replace("server.key", "server.pem"), 3, "holds no PEM private key"),
    (TLS.replace("server.pem", "junk.pem"), 2, "not usable"),
    (TLS.replace("server.key", "junk.key"), 2, "not usable"),
    (TLS.replace("server.key", "other.key"), 3, "not the key of the certificate"),
    (TLS.replace("server.key", "encrypted.key"), 3, "the key is encrypted"),
    (f"{TLS}  cert: x\n", 4, "cert and cert_file say the same"),
    # Client certificates.
    (f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n", 4, "needs client_ca_file"),
    (f"{TLS}  client_auth_type: VerifyClientCertIfGiven\n", 4, "needs client_ca_file"),
    (f"{TLS}  client_auth_type: RequireAnyClientCert\n", 4, "cannot be served"),
    (f"{TLS}  client_auth_type: RequireClientCert\n", 4, "cannot be served"),
    (f"{TLS}  client_auth_type: Always\n", 4, "'Always' is no client_auth_type: NoClientCert,"),
    (f"{TLS}  client_auth_type:\n", 4, "client_auth_type has no value"),
    (f"{TLS}  client_ca_file: ca.pem\n", 4, "has no effect with client_auth_type NoClientCert"),
    (MUTUAL.replace("ca.pem", "gone.pem"), 4, "gone.pem: No such file"),
    (MUTUAL.replace("ca.pem", "junk.pem"), 4, "the client CA is not usable"),
    (f"{TLS}  client_allowed_sans: [a]\n", 4, "needs client_auth_type: RequireAndVerify"),
    (f"{MUTUAL}  client_allowed_sans: a\n", 6, "client_allowed_sans is a list"),
    (f"{MUTUAL}  client_allowed_sans: []\n", 6, "client_allowed_sans is a list"),
    (f"{MUTUAL}  client_allowed_sans:\n  - a\n  - [b]\n", 8, "an entry of client_allowed_sans"),
    # Versions, suites, curves.
    (f"{TLS}  min_version: TLS11\n", 4, "TLS11 is not served (RFC 8996): TLS12 or TLS13"),
    (f"{TLS}  max_version: TLS10\n", 4, "TLS10 is not served"),
    (f"{TLS}  min_version: 1.2\n", 4, "'1.2' is no TLS version"),
    (f"{TLS}  min_version: TLS13\n  max_version: TLS12\n", 5, "max_version is below min_version"),
    (f"{TLS}  cipher_suites: [TLS_MADE_UP]\n", 4, "'TLS_MADE_UP' is no cipher suite"),
    (f"{TLS}  cipher_suites:\n  - TLS_RSA_WITH_RC4_128_SHA\n", 5, "is no cipher suite"),
    (f"{TLS}  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", 4, "name all three or none"),
    (
        f"{TLS}  min_version: TLS13\n  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]\n",
        5,
        "has no effect with min_version: TLS13",
    ),
    (
        f"{TLS}  max_version: TLS12\n  cipher_suites: [TLS_AES_128_GCM_SHA256,"
        " TLS_AES_256_GCM_SHA384, TLS_CHACHA20_POLY1305_SHA256]\n",
        5,
        "no suite of TLS 1.2 is left",
    ),
    (
        f"{TLS}  max_version: TLS12\n  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]\n",
        2,
        "no client could connect with this certificate: no shared cipher",
    ),
    (f"{TLS}  curve_preferences: [CurveP255]\n", 4, "'CurveP255' is no curve: CurveP256"),
    (f"{TLS}  curve_preferences:\n  - X25519\n  - CurveP256\n", 6, "more than one curve"),
    (f"{TLS}  prefer_server_cipher_suites: 1\n", 4, "is true or false, not '1'"),
    # The other sections.
    (
        "http_server_config:\n  http3: true\n",
        2,
        "http3 is not known here; known are http2, headers",
    ),
    ("http_server_config:\n  http2: yes\n", 2, "http2 is true or false, not 'yes'"),
    ("http_server_config:\n  headers:\n    Server: x\n", 3, "Server cannot be set: Content-Sec"),
    ("http_server_config:\n  headers:\n    X-Frame-Options: no\n", 3, "is deny or sameorigin"),
    ('http_server_config:\n  headers:\n    X-XSS-Protection: "a\\r\\nb"\n', 3, "one line of ASCII"),
    ("http_server_config:\n  headers:\n    X-XSS-Protection: [1]\n", 3, "is a string"),
    ("basic_auth_users:\n", 1, "basic_auth_users is a mapping with at least one key"),
    ("basic_auth_users: {}\n", 1, "basic_auth_users is a mapping with at least one key"),
    ("basic_auth_users:\n  alice: secret\n", 2, "alice has no bcrypt hash: htpasswd"),
    ("basic_auth_users:\n  alice:\n", 2, "alice has no value"),
    (f"basic_auth_users:\n  alice: {HASH}x\n", 2, "alice has no bcrypt hash"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$2y', '$2x')}\n", 2, "has no bcrypt hash"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$04', '$03')}\n", 2, "cost is 4 to 15"),
    (f"basic_auth_users:\n  alice: {HASH.replace('$04', '$16')}\n", 2, "cost is 4 to 15"),
    (f"basic_auth_users:\n  'al:ice': {HASH}\n", 2, "no user name"),
    (f'basic_auth_users:\n  "al\\nice": {HASH}\n', 2, "no user name"),
    (f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n", 3, "a comes twice"),
    ("rate_limit:\n  interval: soon\n  burst: 1\n", 2, "'soon' is no duration"),
    ("rate_limit:\n  interval: 1\n  burst: 1\n", 2, "'1' is no duration"),
    ("rate_limit:\n  interval: 1s\n  burst: 1.5\n", 3, "burst is a whole number"),
    (f"rate_limit:\n  interval: 1s\n  burst: {'9' * 5000}\n", 3, "burst is a whole number"),
    ('rate_limit: {interval: "\\U00110000", burst: 1}\n', 1, "this is no YAML"),
    ("rate_limit:\n  interval: 1s\n  burst: 0\n", 2, "burst must be at least 1"),
    ("rate_limit:\n  interval: 1s\n", 2, "burst must be at least 1"),
    ("rate_limit:\n  every: 1s\n", 2, "every is not known here"),
]


@pytest.mark.parametrize(("text", "line", "words"), WRONG)
def test_a_mistake_is_refused_with_its_file_and_line(
    text: str, line: int, words: str, folder: Path
) -> None:
    with pytest.raises(WebConfigError, match=re.escape(words)) as caught:
        understood(folder, text)
    assert str(caught.value).startswith(f"{folder}/web-config.yml:{line}: ")
    assert HASH[10:] not in str(caught.value)


RIGHT = [
    "",
    "# nothing but a comment\n",
    TLS,
    MUTUAL,
    f"{TLS}  client_auth_type: NoClientCert\n",
    f"{TLS}  client_auth_type: RequestClientCert\n",
    MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"),
    f"{MUTUAL}  client_allowed_sans:\n  - a\n  - 10.0.0.1\n",
    f"{TLS}  min_version: TLS13\n  max_version: TLS13\n",
    f"{TLS}  max_version: TLS12\n  prefer_server_cipher_suites: false\n",
    f"{TLS}  curve_preferences: [CurveP521]\n",
    f"{TLS}  cipher_suites:\n  - TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384\n"
    "  - TLS_AES_128_GCM_SHA256\n  - TLS_AES_256_GCM_SHA384\n"
    "  - TLS_CHACHA20_POLY1305_SHA256\n",
    "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n",
    f"basic_auth_users:\n  alice: {HASH}\n  bob: {HASH.replace('2y', '2a')}\n",
    "rate_limit:\n  interval: 1m30.5s\n  burst: 3\n",
    "rate_limit:\n  interval: 0\n  burst: 0\n",
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_the_format_knows_is_understood(text: str, folder: Path) -> None:
    assert isinstance(understood(folder, text), WebConfig)


def test_every_suite_of_go_is_one_of_openssl(folder: Path) -> None:
    names = [
        f"TLS_ECDHE_{key}_WITH_{rest}"
        for key in ("RSA", "ECDSA")
        for rest in (
            *("AES_128_GCM_SHA256", "AES_256_GCM_SHA384", "CHACHA20_POLY1305_SHA256"),
            *("AES_128_CBC_SHA", "AES_256_CBC_SHA"),
        )
    ]
    config = understood(folder, f"{TLS}  cipher_suites: [{', '.join(names)}]\n")
    assert config.settings.tls is not None
    older = [c for c in config.settings.tls.get_ciphers() if c["protocol"] != "TLSv1.3"]
    assert len(older) == len(names)


def test_an_empty_file_asks_for_nothing(folder: Path) -> None:
    settings = understood(folder, "").settings
    assert settings.tls is None
    assert settings.refusal(HttpRequest("GET", "/")) is None


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"gone\.yml:1: cannot be read: No such file"):
        load_web_config(str(tmp_path / "gone.yml"), WebConfigFiles())


def test_a_file_that_is_not_utf8_is_refused_with_the_line(folder: Path) -> None:
    path = folder / "latin.yml"
    path.write_bytes(b"# one\nx: \xe4\n")
    with pytest.raises(WebConfigError, match=r"latin\.yml:2: this is not UTF-8"):
        load_web_config(str(path), WebConfigFiles())


def test_certificates_may_be_in_the_file_itself(folder: Path) -> None:
    def block(name: str) -> str:
        return (folder / name).read_text().replace("\n", "\n    ").rstrip()

    text = (
        f"tls_server_config:\n  cert: |\n    {block('server.pem')}\n"
        f"  key: |\n    {block('server.key')}\n  client_ca: |\n    {block('ca.pem')}\n"
        "  client_auth_type: RequireAndVerifyClientCert\n"
    )
    assert understood(folder, text).settings.tls is not None


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (f"{TLS}http_server_config:\n  http2: true\n", "HTTP/1.1"),
        (f"{TLS}  client_auth_type: RequestClientCert\n", "as NoClientCert does"),
        (f"basic_auth_users:\n  a: {HASH}\n", "in the clear"),
        (f"{TLS}basic_auth_users:\n  a: {HASH}\n  b: {HASH.replace('$04', '$05')}\n", "cost"),
    ],
)
def test_what_is_accepted_with_a_reservation_is_said(text: str, note: str, folder: Path) -> None:
    (said,) = understood(folder, text).notes
    assert note in said


def test_headers_are_passed_on_and_blank_ones_left_out(folder: Path) -> None:
    text = (
        "http_server_config:\n  headers:\n    X-Frame-Options: sameorigin\n"
        "    X-XSS-Protection: ''\n    Content-Security-Policy: default-src 'none'\n"
    )
    assert understood(folder, text).settings.headers == (
        ("X-Frame-Options", "sameorigin"),
        ("Content-Security-Policy", "default-src 'none'"),
    )


def test_over_the_rate_is_429(folder: Path) -> None:
    refusal = understood(folder, "rate_limit:\n  interval: 1h\n  burst: 3\n").settings.refusal
    answers = [refusal(HttpRequest("GET", "/")) for _ in range(4)]
    assert answers[:3] == [None, None, None]
    assert answers[3] is not None
    assert answers[3].status == 429


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
    monkeypatch.delitem(sys.modules, "gpulock_exporter.webconfig.yaml_lines", raising=False)
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
