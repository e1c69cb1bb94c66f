# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: the keys of Prometheus's exporter-toolkit for TLS, client certificates and users.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md
PyYAML and bcrypt are optional packages: each is imported where it is needed.

bcrypt is slow on purpose (48 ms at cost 10), so strangers could spend all of a node's time on wrong
passwords. Each check waits for the one before. A few of each client may wait, so that a thousand
from one address delay another by those few. A verdict is remembered even where its client has gone
meanwhile: a scrape that came too early for it finds it the next time.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import re
import ssl
import stat
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from gpulock.errors import one_line
from gpulock_exporter.web.http import HttpRequest, HttpResponse, error_response
from gpulock_exporter.web.server import WebSettings

if TYPE_CHECKING:
    from yaml import MappingNode

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
PLACES, PLACES_OF_ONE = 128, 8  # for checks that wait, of all clients and of one
_WRONG_REMEMBERED = 256
_LONGEST_PASSWORD = 72  # bcrypt knows no more bytes of it
_CHALLENGE = ("WWW-Authenticate", 'Basic realm="gpulock"')


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
    """Return what a file holds, and note its mode."""
    with open(path, "rb") as file:
        modes[path] = os.fstat(file.fileno()).st_mode
        return file.read()


def _parse_yaml(text: str) -> Any:
    """Return a document of mappings, lists and texts alone; raise WebConfigError."""
    try:
        import yaml
    except ImportError as error:
        what = "this file needs PyYAML: python3-yaml, RHEL python3-pyyaml, pip 'gpulock[web]'"
        raise WebConfigError(what) from error

    class Loader(yaml.BaseLoader):  # no number, no date, no object
        def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            if len(mapping) < len(node.value):
                raise yaml.MarkedYAMLError(
                    problem="a key comes twice", problem_mark=node.start_mark
                )
            return mapping

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
    sections: dict[str, Section] = top
    return sections


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
            _read_file(paths[key], modes)  # of a missing one OpenSSL does not say which
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
        from bcrypt import checkpw
    except ImportError as error:
        what = f"{_USERS} needs bcrypt: python3-bcrypt, on RHEL of EPEL, pip 'gpulock[web]'"
        raise WebConfigError(what) from error
    return Passwords(users, checkpw)


class Passwords:
    """Check users' passwords against their bcrypt hashes."""

    def __init__(self, hashes: Mapping[str, str], check: Callable[[bytes, bytes], bool]) -> None:
        """`check` is bcrypt.checkpw, of a password and a hash."""
        self._hashes = {user: hashed.encode() for user, hashed in hashes.items()}
        self._check = check
        self._last = threading.Event()  # set once the last check is over
        self._last.set()
        self._waiting = Counter[str]()  # checks by client
        # A stranger's name takes as long as the dearest known one.
        self._decoy = max(hashes.values(), key=lambda one: int(one.split("$")[2])).encode()
        self._key = os.urandom(32)
        self._right: dict[str, bytes] = {}  # at most one a user, so the wrong ones push none out
        self._wrong: dict[bytes, None] = {}  # in the order that they came
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Return how many checks wait, or are made."""
        return sum(self._waiting.values())

    def refusal(self, request: HttpRequest) -> HttpResponse | None:
        """Return the answer to a request that may not pass, None for one that may."""
        given = parse_basic_credentials(request.headers.get("authorization", ""))
        is_right = given is not None and self.is_right(*given, client_network(request.peer))
        if is_right is None:
            return error_response(503, "too many passwords are being checked", ("Retry-After", "1"))
        what = "a user name and its password are needed"
        return None if is_right else error_response(401, what, _CHALLENGE)

    def is_right(self, user: str, password: bytes, client: str) -> bool | None:
        """Return whether this is the user's password; None: too many others wait for a check."""
        name = user.encode()
        message = len(name).to_bytes(4, "big") + name + password
        digest = hmac.digest(self._key, message, "sha256")  # the key makes it worthless elsewhere
        known = self._known(user, digest)
        if known is not None:
            return known
        with self._lock:
            if self._waiting[client] >= PLACES_OF_ONE or self.waiting >= PLACES:
                return None
            self._waiting[client] += 1
            before, self._last = self._last, threading.Event()
            mine = self._last
        before.wait()
        try:
            return self._judge(user, password, digest)
        except ValueError:  # a hash that bcrypt dislikes
            return False
        finally:
            mine.set()
            with self._lock:
                self._waiting[client] -= 1
                self._waiting += Counter()  # forgets who has none

    def _judge(self, user: str, password: bytes, digest: bytes) -> bool:
        """Check, and remember, unless the same one was before us in the queue."""
        known = self._known(user, digest)
        if known is not None:
            return known
        hashed = self._hashes.get(user)
        # Some versions of bcrypt cut a password short at these, others raise.
        is_possible = len(password) <= _LONGEST_PASSWORD and b"\0" not in password
        fits = self._check(password if is_possible else b"", hashed or self._decoy)
        fits = fits and is_possible and hashed is not None
        with self._lock:
            if fits:
                self._right[user] = digest
            else:
                self._wrong[digest] = None
                if len(self._wrong) > _WRONG_REMEMBERED:
                    del self._wrong[next(iter(self._wrong))]
        return fits

    def _known(self, user: str, digest: bytes) -> bool | None:
        with self._lock:
            if hmac.compare_digest(self._right.get(user, self._key), digest):
                return True
            return False if digest in self._wrong else None


def parse_basic_credentials(authorization: str) -> tuple[str, bytes] | None:
    """Return user and password from an Authorization header, or None when there are none."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded.strip().encode("ascii"), validate=True)
        name, colon, password = decoded.partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # not ASCII, not base64, not UTF-8
        return None


def client_network(peer: str) -> str:
    """Return what stands for one client: an IPv4 address, or an IPv6 /64, which one may own.

    On this machine everybody has all of 127.0.0.0/8: what is not its first is one.
    """
    address = ipaddress.ip_address(peer.partition("%")[0])
    is_other_local = address.is_loopback and peer != "127.0.0.1"
    bits = 64 if address.version == 6 else 8 if is_other_local else 32  # noqa: PLR2004
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
