# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: the keys of Prometheus's exporter-toolkit for TLS, client certificates and users.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md
PyYAML and bcrypt are optional packages: each is imported where it is needed.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
import stat
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NoReturn

from gpulock.errors import one_line
from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.webconfig.passwords import Passwords

if TYPE_CHECKING:
    from yaml import MappingNode

_LARGEST = 1024 * 1024  # bytes; a CA bundle has a few hundred KiB
_TLS, _USERS, _HTTP = "tls_server_config", "basic_auth_users", "http_server_config"
_SUITES = "cipher_suites"
_KEYS = {
    _TLS: ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", _SUITES),
    _USERS: (),
    _HTTP: ("http2",),
}
_VERSIONS = ("TLS12", "TLS13")  # at least: TLS 1.3 alone is served, in which suites are not chosen
_VERIFY = {  # the others let in any certificate, or none
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
# of cost 4 to 15, which takes 1.5 s: above it a scrape would time out
_HASH = re.compile(r"\$2[aby]\$(0[4-9]|1[0-5])\$[./A-Za-z0-9]{53}")

Section = dict[str, str]


class WebConfigError(ValueError):
    """A mistake in a web configuration, with its file and key: nothing is served by it."""


def load_web_config(path: str) -> tuple[WebSettings, str]:
    """Return what to serve by, and what to warn of; raise WebConfigError for any mistake.

    A file that says nothing is one: a disk that was full makes it so, and it would open the
    exporter to everybody.
    """
    path, modes = os.path.abspath(path), dict[str, int]()
    folder = os.path.dirname(path)
    try:
        sections = _check_sections(_parse_yaml(_read_file(path, modes).decode()))
        tls, users = sections.get(_TLS, {}), sections.get(_USERS, {})
        context = _make_tls_context(tls, folder, modes) if tls else None
        passwords = _make_passwords(users) if users else None
    except (OSError, ValueError) as error:  # not UTF-8, among others
        raise WebConfigError(one_line(f"{path}: {error}")) from error
    secret = {os.path.join(folder, tls.get("key_file", "")), path if users else ""}
    clear = users and not tls
    warnings = [f"{_USERS} without {_TLS}: passwords travel in the clear"] if clear else []
    warnings += [
        f"every user may {'write' if mode & stat.S_IWOTH else 'read'} {name}"
        for name, mode in modes.items()
        if mode & (stat.S_IWOTH | (stat.S_IROTH if name in secret else 0))
    ]
    return WebSettings(context, passwords.refusal if passwords else None), "; ".join(warnings)


def _read_file(path: str, modes: dict[str, int]) -> bytes:
    """Return what a file holds, and note its mode. A pipe has nobody wait."""
    with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
        modes[path] = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(modes[path]):
            raise OSError(errno.EINVAL, "this is not a regular file", path)
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(errno.EFBIG, f"this is larger than {_LARGEST} bytes", path)
    return content


def _parse_yaml(text: str) -> Any:
    """Return a document of mappings, lists and texts alone; raise WebConfigError."""
    try:
        import yaml
    except ImportError as error:
        what = "this file needs PyYAML: pip install 'gpulock[web]' (Debian: python3-yaml)"
        raise WebConfigError(what) from error

    class Loader(yaml.BaseLoader):  # no number, no date, no object
        def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise yaml.MarkedYAMLError(
                    problem="a key comes twice", problem_mark=node.start_mark
                )
            return found

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise WebConfigError(f"this is no YAML: {one_line(str(error))}") from error


def _check_sections(top: Any) -> dict[str, Section]:
    """Return the sections, each with texts alone; raise WebConfigError for anything unknown."""
    if top is None:
        raise WebConfigError("it is empty: without TLS and users leave WEB_CONFIG out")
    _check_keys("this file", top, _KEYS)
    for name, section in top.items():
        _check_keys(name, section, _KEYS[name])
        for key, value in section.items():
            if (name, key) != (_TLS, _SUITES) and not (isinstance(value, str) and value):
                raise WebConfigError(f"{name}.{key} is not a text: write one, or leave it out")
    found: dict[str, Section] = top
    return found


def _check_keys(name: str, mapping: Any, known: Collection[str]) -> None:
    """Check that this is a mapping of keys that are known; none: of any."""
    if not isinstance(mapping, dict) or not mapping:
        raise WebConfigError(f"{name} is not a mapping with at least one key")
    for key in mapping:
        if known and key not in known:
            raise WebConfigError(f"{name}: {key} is not supported; there are {', '.join(known)}")


def _make_tls_context(tls: Section, folder: str, modes: dict[str, int]) -> ssl.SSLContext:
    """Load everything that the section names."""
    version, auth = tls.get("min_version", "TLS12"), tls.get("client_auth_type", "NoClientCert")
    if not {"cert_file", "key_file"} <= {*tls}:
        raise WebConfigError(f"{_TLS} needs cert_file and key_file")
    if version not in _VERSIONS:
        raise WebConfigError(f"{_TLS}.min_version {version!r} is not served: TLS12 or TLS13")
    if auth not in _VERIFY:
        what = f"{auth!r} is not supported; supported are {', '.join(_VERIFY)}"
        raise WebConfigError(f"{_TLS}.client_auth_type {what}")
    if (_VERIFY[auth] is ssl.CERT_NONE) is ("client_ca_file" in tls):
        needs = "has no use for" if "client_ca_file" in tls else "needs"
        raise WebConfigError(f"{_TLS}.client_auth_type {auth} {needs} client_ca_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # of 1.2 OpenSSL would keep sessions
    context.verify_mode = _VERIFY[auth]
    context.set_alpn_protocols(["http/1.1"])

    def refuse_password() -> NoReturn:  # without it OpenSSL would ask on the terminal
        raise WebConfigError(f"{_TLS}.key_file is encrypted: it must be readable as it is")

    paths: dict[str, str] = {}
    for key in ("cert_file", "key_file", "client_ca_file"):
        if key in tls:
            paths[key] = os.path.join(folder, tls[key])
            _read_file(paths[key], modes)  # OpenSSL would wait at a pipe
    try:
        context.load_cert_chain(paths["cert_file"], paths["key_file"], refuse_password)
        if "client_ca_file" in tls:
            context.load_verify_locations(paths["client_ca_file"])
    except ssl.SSLError as error:
        raise WebConfigError(f"{' '.join(paths.values())}: {error.reason or error}") from error
    return context


def _make_passwords(users: Section) -> Passwords:
    for name, hashed in users.items():
        if not name or ":" in name or not name.isprintable():
            raise WebConfigError(f"{_USERS}: {name!r} is no name: printable, without a colon")
        if not _HASH.fullmatch(hashed):
            what = "has no bcrypt hash of cost 4 to 15: htpasswd -nBC 10 ''"
            raise WebConfigError(f"{_USERS}.{name} {what}")
    try:
        import bcrypt
    except ImportError as error:
        what = f"{_USERS} needs bcrypt: pip install 'gpulock[web]' (Debian: python3-bcrypt)"
        raise WebConfigError(what) from error
    return Passwords(users, bcrypt.checkpw)
