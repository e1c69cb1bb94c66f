# SPDX-License-Identifier: Apache-2.0
"""tls_server_config: what it may say, checked before any certificate is touched.

What Python's ssl cannot do is refused by name and line. Nothing is taken and then left undone.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from gpulock_exporter.web.client_names import normalize_ip_address
from gpulock_exporter.webconfig.yaml_lines import Section, Text

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_FORBIDDEN_VERSIONS = {"TLS10", "TLS11"}
_CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
# Go's names of the suites of TLS 1.2, with OpenSSL's.
_CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
    for key in ("ECDSA", "RSA")
    for go, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
}
_TLS13_CIPHERS = {
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
}
_VERIFY = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # it lets in whoever comes, with any certificate or none
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED = {"RequireAnyClientCert", "RequireClientCert"}  # the second: its old name
_KEYS = (
    "cert_file, key_file, client_ca_file, cert, key, client_ca, client_auth_type,"
    " client_allowed_sans, min_version, max_version, cipher_suites,"
    " prefer_server_cipher_suites, curve_preferences"
)


@dataclass(frozen=True, slots=True)
class Material:
    """A certificate or a key: the path of a file, or the PEM text itself."""

    text: Text
    is_inline: bool


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """What tls_server_config asks for, all of it understood."""

    certificate: Material
    key: Material
    client_ca: Material | None
    client_auth: str
    verify: ssl.VerifyMode
    allowed_names: frozenset[str]
    lowest: ssl.TLSVersion
    highest: ssl.TLSVersion
    ciphers: str  # OpenSSL's list; empty for its default
    prefers_own_order: bool
    curve: str  # OpenSSL's name; empty for its default


def parse_tls_section(section: Section, line: int = 1) -> TlsOptions:
    """Understand the section, or raise WebConfigError with the line of the first mistake."""
    certificate, key = _parse_material(section, "cert"), _parse_material(section, "key")
    client_ca = _parse_material(section, "client_ca")
    lowest, highest = _parse_tls_versions(section)
    client_auth, verify = _parse_client_auth(section, client_ca)
    names = section.texts("client_allowed_sans")
    if names and verify is not ssl.CERT_REQUIRED:
        needed = "client_auth_type: RequireAndVerifyClientCert"
        section.fail(names[0].line, f"client_allowed_sans needs {needed}")
    ciphers = _parse_ciphers(section, lowest, highest)
    prefers = section.flag("prefer_server_cipher_suites")
    curve = _parse_curve(section)
    section.end(_KEYS)
    if certificate is None or key is None:
        section.fail(line, "tls_server_config needs cert_file and key_file")
    return TlsOptions(
        certificate,
        key,
        client_ca,
        client_auth,
        verify,
        frozenset(normalize_ip_address(name.value) for name in names),
        lowest,
        highest,
        ciphers,
        prefers is not False,
        curve,
    )


def _parse_material(section: Section, name: str) -> Material | None:
    inline, file = section.text(name), section.text(f"{name}_file")
    if inline is not None and file is not None:
        section.fail(inline.line, f"{name} and {name}_file say the same: leave one out")
    found = inline or file
    if found is not None and not found.value:
        section.fail(found.line, f"{name if found is inline else f'{name}_file'} is empty")
    return None if found is None else Material(found, inline is not None)


def _parse_tls_versions(section: Section) -> tuple[ssl.TLSVersion, ssl.TLSVersion]:
    first, last = section.text("min_version"), section.text("max_version")
    for text in (first, last):
        if text is None:
            continue
        if text.value in _FORBIDDEN_VERSIONS:
            section.fail(text.line, f"{text.value} is not served (RFC 8996): TLS12 or TLS13")
        if text.value not in _VERSIONS:
            section.fail(text.line, f"{text.value!r} is no TLS version: TLS12 or TLS13")
    lowest = _VERSIONS[first.value if first else "TLS12"]
    highest = _VERSIONS[last.value if last else "TLS13"]
    if last is not None and lowest > highest:
        section.fail(last.line, "max_version is below min_version")
    return lowest, highest


def _parse_client_auth(section: Section, client_ca: Material | None) -> tuple[str, ssl.VerifyMode]:
    text = section.text("client_auth_type")
    name = text.value if text else "NoClientCert"
    line = text.line if text else 1
    if name in _UNVERIFIED:
        section.fail(
            line,
            f"{name} cannot be served: Python's ssl takes no certificate that it does not"
            " verify; use RequireAndVerifyClientCert with client_ca_file",
        )
    if name not in _VERIFY:
        known = ", ".join([*_VERIFY, "RequireAnyClientCert"])
        section.fail(line, f"{name!r} is no client_auth_type: {known}")
    verify = _VERIFY[name]
    if verify is not ssl.CERT_NONE and client_ca is None:
        section.fail(line, f"{name} needs client_ca_file")
    if verify is ssl.CERT_NONE and client_ca is not None:
        section.fail(
            client_ca.text.line,
            f"a client CA has no effect with client_auth_type {name}:"
            " RequireAndVerifyClientCert makes it one",
        )
    return name, verify


def _parse_ciphers(section: Section, lowest: ssl.TLSVersion, highest: ssl.TLSVersion) -> str:
    texts = section.texts("cipher_suites")
    if not texts:
        return ""
    for text in texts:
        if text.value not in _CIPHERS and text.value not in _TLS13_CIPHERS:
            known = ", ".join(sorted(_CIPHERS))
            section.fail(text.line, f"{text.value!r} is no cipher suite that is served: {known}")
    named = [text.value for text in texts]
    newest = _TLS13_CIPHERS & {*named}
    if newest and newest != _TLS13_CIPHERS:
        line = next(text.line for text in texts if text.value in newest)
        section.fail(
            line,
            "the suites of TLS 1.3 cannot be chosen from (nor can Go): name all three or none",
        )
    older = [_CIPHERS[name] for name in named if name in _CIPHERS]
    can_be_older, must_be_older = lowest < _VERSIONS["TLS13"], highest < _VERSIONS["TLS13"]
    if can_be_older and not older:
        section.fail(texts[0].line, "no suite of TLS 1.2 is left: add one, or min_version: TLS13")
    if must_be_older and newest:
        section.fail(texts[0].line, "a suite of TLS 1.3 has no effect with max_version: TLS12")
    if not can_be_older and older:
        section.fail(texts[0].line, "a suite of TLS 1.2 has no effect with min_version: TLS13")
    return ":".join(older)


def _parse_curve(section: Section) -> str:
    texts = section.texts("curve_preferences")
    if not texts:
        return ""
    for text in texts:
        if text.value not in _CURVES:
            section.fail(text.line, f"{text.value!r} is no curve: {', '.join(_CURVES)}")
    if len(texts) > 1:
        section.fail(
            texts[1].line,
            "more than one curve cannot be set by Python's ssl: name one, or leave"
            " curve_preferences out for X25519 and the NIST curves",
        )
    return _CURVES[texts[0].value]
