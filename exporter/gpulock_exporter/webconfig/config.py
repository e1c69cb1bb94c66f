# SPDX-License-Identifier: Apache-2.0
"""web-config.yml, as in every exporter made with Prometheus's exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulock_exporter.web.server_settings import WebSettings
from gpulock_exporter.webconfig.access import RequestGuard, TokenBucket
from gpulock_exporter.webconfig.files import WebConfigError, WebConfigFiles
from gpulock_exporter.webconfig.passwords import Passwords, bcrypt_cost

if TYPE_CHECKING:
    from gpulock_exporter.web.response import Headers
    from gpulock_exporter.webconfig.yaml_lines import Section

_KEYS = "tls_server_config, http_server_config, basic_auth_users, rate_limit"
_HEADERS: dict[str, tuple[str, ...]] = {  # with the values they may have, where not any
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")
_HASH = re.compile(r"\$2[aby]\$[0-9]{2}\$[./A-Za-z0-9]{53}")
_LOWEST_COST, _HIGHEST_COST = 4, 15  # 15 takes 1.5 s: above it a scrape would time out
_BURST = re.compile(r"[0-9]{1,18}")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class WebConfig:
    """A configuration that was understood in full: what to serve by, and what to tell of it."""

    settings: WebSettings
    notes: tuple[str, ...] = ()


def load_web_config(path: str, files: WebConfigFiles) -> WebConfig:
    """Read a configuration; raise WebConfigError with file and line for any mistake in it."""
    path = os.path.abspath(path)
    try:
        content = files.read(path)
    except OSError as error:
        raise WebConfigError(path, 1, f"cannot be read: {error.strerror}") from error
    try:
        from gpulock_exporter.webconfig.yaml_lines import read_yaml
    except ImportError as error:
        what = "this file needs PyYAML: pip install 'gpulock[web]' (Debian: python3-yaml)"
        raise WebConfigError(path, 1, what) from error
    section = read_yaml(path, content)
    return WebConfig(WebSettings()) if section is None else _parse_web_config(path, section, files)


def _parse_web_config(path: str, top: Section, files: WebConfigFiles) -> WebConfig:
    from gpulock_exporter.webconfig.tls import parse_tls_section
    from gpulock_exporter.webconfig.tls_context import make_context

    notes: list[str] = []
    tls_line = top.line_of("tls_server_config")
    tls = top.section("tls_server_config")
    options = None if tls is None else parse_tls_section(tls, tls_line)
    headers = _parse_http_headers(top.section("http_server_config"), notes)
    passwords = _parse_passwords(path, top.section("basic_auth_users"), notes)
    bucket = _parse_rate_limit(top.section("rate_limit"))
    top.end(_KEYS)
    if options is not None and options.client_auth == "RequestClientCert":
        notes.append("RequestClientCert lets in whoever comes, as NoClientCert does")
    if passwords is not None and options is None:
        notes.append("basic_auth_users without tls_server_config: passwords travel in the clear")
    context = None if options is None else make_context(path, options, files)
    names = frozenset[str]() if options is None else options.allowed_names
    guard = RequestGuard(names, bucket, passwords)
    return WebConfig(WebSettings(context, headers, guard.refusal), tuple(notes))


def _parse_http_headers(section: Section | None, notes: list[str]) -> Headers:
    if section is None:
        return ()
    if section.flag("http2"):
        notes.append("http2: this exporter speaks HTTP/1.1, which every client of HTTP/2 does too")
    headers = section.section("headers")
    section.end("http2, headers")
    if headers is None:
        return ()
    pairs: list[tuple[str, str]] = []
    for name, value in headers.pairs():
        allowed = _HEADERS.get(name.value)
        if allowed is None:
            headers.fail(name.line, f"{name.value} cannot be set: {', '.join(_HEADERS)}")
        if allowed and value.value not in allowed:
            headers.fail(value.line, f"{name.value} is {' or '.join(allowed)}")
        if not value.value:
            continue  # "unset if blank"
        if not _HEADER_VALUE.fullmatch(value.value):
            headers.fail(value.line, f"{name.value} is one line of ASCII without blanks around it")
        pairs.append((name.value, value.value))
    return tuple(pairs)


def _parse_passwords(path: str, section: Section | None, notes: list[str]) -> Passwords | None:
    if section is None:
        return None
    hashes: dict[str, bytes] = {}
    line = 1
    for name, value in section.pairs():
        line = name.line
        if not name.value or ":" in name.value or not name.value.isprintable():
            section.fail(line, f"{name.value!r} is no user name: printable, without a colon")
        if not _HASH.fullmatch(value.value):
            section.fail(value.line, f"{name.value} has no bcrypt hash: htpasswd -nBC 10 ''")
        hashes[name.value] = value.value.encode()
        if not _LOWEST_COST <= bcrypt_cost(hashes[name.value]) <= _HIGHEST_COST:
            section.fail(value.line, f"a bcrypt cost is {_LOWEST_COST} to {_HIGHEST_COST}")
    try:
        import bcrypt
    except ImportError as error:
        what = "basic_auth_users needs bcrypt: pip install 'gpulock[web]' (Debian: python3-bcrypt)"
        raise WebConfigError(path, line, what) from error
    if len({bcrypt_cost(hashed) for hashed in hashes.values()}) > 1:
        notes.append("basic_auth_users: hashes of different cost tell strangers which names exist")
    return Passwords(hashes, bcrypt.checkpw)


def _parse_rate_limit(section: Section | None) -> TokenBucket | None:
    if section is None:
        return None
    interval, burst = section.text("interval"), section.text("burst")
    section.end("interval, burst")
    seconds = 0.0 if interval is None else _parse_go_duration(interval.value)
    if interval is not None and seconds is None:
        section.fail(interval.line, f"{interval.value!r} is no duration, such as 500ms or 1s")
    if burst is not None and not _BURST.fullmatch(burst.value):
        section.fail(burst.line, f"burst is a whole number, not {burst.value[:20]!r}")
    if not seconds:
        return None  # "set to 0 to disable"
    if burst is None or not int(burst.value):
        line = 1 if interval is None else interval.line
        section.fail(line, "burst must be at least 1, or every request would be refused")
    return TokenBucket(seconds, int(burst.value))


def _parse_go_duration(text: str) -> float | None:
    """Read a duration as Go writes it: 1m30s, 500ms, 0."""
    if text == "0":
        return 0.0
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
