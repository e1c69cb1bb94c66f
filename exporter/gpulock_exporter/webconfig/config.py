# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: the keys of Prometheus's exporter-toolkit for TLS, client certificates and users.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md
"""

from __future__ import annotations

import os
import re
import ssl
from typing import NoReturn

from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.webconfig.files import Entry, Section, WebConfigFiles, read_sections
from gpulock_exporter.webconfig.passwords import Passwords, bcrypt_cost

_TLS, _USERS, _HTTP = "tls_server_config", "basic_auth_users", "http_server_config"
_SUITES = "cipher_suites"
_KEYS = {
    _TLS: ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", _SUITES),
    _USERS: (),
    _HTTP: ("http2",),
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_VERIFY = {  # Python's ssl takes no certificate that it does not verify: there is no RequireAny
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # lets in any client, with any certificate or none
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_HASH = re.compile(r"\$2[aby]\$[0-9]{2}\$[./A-Za-z0-9]{53}")
_LOWEST_COST, _HIGHEST_COST = 4, 15  # 15 takes 1.5 s: above it a scrape would time out


def load_web_config(path: str, files: WebConfigFiles) -> tuple[WebSettings, list[str]]:
    """Return what to serve by, and what to tell of it; raise WebConfigError for any mistake."""
    sections = read_sections(os.path.abspath(path), files, _KEYS, lists=(_SUITES,))
    tls, users = sections.get(_TLS), sections.get(_USERS)
    passwords = _make_passwords(users) if users else None
    notes: list[str] = []
    if _HTTP in sections:
        notes.append(f"{_HTTP}: http2 has no effect, HTTP/1.0 alone is served")
    if users and not tls:
        notes.append(f"{_USERS} without {_TLS}: passwords travel in the clear")
    if users and len({bcrypt_cost(entry.value) for entry in users.values()}) > 1:
        notes.append(f"{_USERS}: hashes of different cost tell strangers which names exist")
    if tls and _SUITES in tls:
        notes.append(f"{_SUITES} has no effect: TLS 1.3 alone has its own")
    if tls and (kind := tls.get("client_auth_type")) and kind.value == "RequestClientCert":
        notes.append("RequestClientCert lets in any client, as NoClientCert does")
    context = _make_tls_context(tls, files) if tls else None
    return WebSettings(context, passwords.refusal if passwords else None), notes


def _make_tls_context(section: Section, files: WebConfigFiles) -> ssl.SSLContext:
    """Load everything that the section names."""
    certificate, key = section.get("cert_file"), section.get("key_file")
    if certificate is None or key is None:
        raise next(iter(section.values())).fault(f"{_TLS} needs cert_file and key_file")
    version = section.get("min_version")
    if version and version.value not in _VERSIONS:  # RFC 8996: TLS 1.1 is served no more
        raise version.fault(f"{version.value!r} is not served: TLS12 or TLS13")
    suites = section.get(_SUITES)
    if suites and not (version and version.value == "TLS13"):
        raise suites.fault(f"{_SUITES} needs min_version TLS13, which has no others; leave it out")
    verify, authority = _parse_client_auth(section)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[version.value if version else "TLS12"]
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    certificate_file = _check_pem(certificate, files, b"CERTIFICATE-----")
    key_file = _check_pem(key, files, b"PRIVATE KEY-----")

    def refuse_password() -> NoReturn:  # without it OpenSSL would ask on the terminal
        raise key.fault("the key is encrypted: it must be readable as it is")

    try:
        context.load_cert_chain(certificate_file, key_file, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise key.fault("the key is not the key of the certificate") from error
        what = f"the certificate and its key are not usable: {error.reason or error}"
        raise certificate.fault(what) from error
    context.verify_mode = verify
    if authority is not None:
        authority_file = _check_pem(authority, files, b"CERTIFICATE-----")
        try:
            context.load_verify_locations(authority_file)
        except ssl.SSLError as error:
            what = f"the client CA is not usable: {error.reason or error}"
            raise authority.fault(what) from error
    return context


def _parse_client_auth(section: Section) -> tuple[ssl.VerifyMode, Entry | None]:
    """Return how client certificates are verified, and the file that says by whom."""
    entry, authority = (section.get(k) for k in ("client_auth_type", "client_ca_file"))
    name = entry.value if entry else "NoClientCert"
    if entry and name not in _VERIFY:
        raise entry.fault(f"{name!r} is not supported; supported are {', '.join(_VERIFY)}")
    verify = _VERIFY[name]
    if entry and verify is not ssl.CERT_NONE and authority is None:
        raise entry.fault(f"{name} needs client_ca_file")
    if verify is ssl.CERT_NONE and authority is not None:
        why = f"client_ca_file has no effect with client_auth_type {name}"
        raise authority.fault(f"{why}: write RequireAndVerifyClientCert")
    return verify, authority


def _check_pem(entry: Entry, files: WebConfigFiles, marker: bytes) -> str:
    """Return the path of a file that has this kind of PEM block; remember the file."""
    path = os.path.join(os.path.dirname(entry.path), entry.value)
    try:
        content = files.read(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "this holds a NUL byte"
        raise entry.fault(f"{path}: {why}") from error
    if marker not in content:
        kind = marker.decode().removesuffix("-----").lower()
        raise entry.fault(f"{path} holds no PEM {kind}")
    return path


def _make_passwords(section: Section) -> Passwords:
    for name, entry in section.items():
        if ":" in name or not name.isprintable():
            raise entry.fault(f"{name!r} is no user name: printable, without a colon")
        if not _HASH.fullmatch(entry.value):
            raise entry.fault(f"{name} has no bcrypt hash: htpasswd -nBC 10 ''")
        if not _LOWEST_COST <= bcrypt_cost(entry.value) <= _HIGHEST_COST:
            raise entry.fault(f"a bcrypt cost is {_LOWEST_COST} to {_HIGHEST_COST}")
    try:
        import bcrypt
    except ImportError as error:
        what = f"{_USERS} needs bcrypt: pip install 'gpulock[web]' (Debian: python3-bcrypt)"
        raise next(iter(section.values())).fault(what) from error
    return Passwords({name: entry.value for name, entry in section.items()}, bcrypt.checkpw)
