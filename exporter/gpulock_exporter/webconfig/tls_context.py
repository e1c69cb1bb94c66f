# SPDX-License-Identifier: Apache-2.0
"""An SSLContext of what tls_server_config says: certificates read, parsed and matched."""

from __future__ import annotations

import os
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from gpulock_exporter.webconfig.files import WebConfigError, WebConfigFiles
from gpulock_exporter.webconfig.tls import Material, TlsOptions

_MOST_FLIGHTS = 4


def make_context(path: str, options: TlsOptions, files: WebConfigFiles) -> ssl.SSLContext:
    """Load everything that `options` names; raise WebConfigError with the line that named it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = options.lowest
    context.maximum_version = options.highest
    context.options |= ssl.OP_NO_RENEGOTIATION
    if not options.prefers_own_order:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if options.ciphers:
        context.set_ciphers(options.ciphers)
    if options.curve:
        context.set_ecdh_curve(options.curve)
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, path, options, files)
    context.verify_mode = options.verify
    if options.client_ca is not None:
        _load_authority(context, path, options.client_ca, files)
    _try_handshake(context, path, options.certificate.text.line)
    return context


def _load_pair(
    context: ssl.SSLContext, path: str, options: TlsOptions, files: WebConfigFiles
) -> None:
    certificate = _read_pem(path, options.certificate, files, b"CERTIFICATE-----")
    key = _read_pem(path, options.key, files, b"PRIVATE KEY-----")
    key_line = options.key.text.line

    def refuse_password() -> NoReturn:  # without it OpenSSL would ask on the terminal
        raise WebConfigError(path, key_line, "the key is encrypted: it must be readable as it is")

    with _content_as_file(certificate) as certificate_file, _content_as_file(key) as key_file:
        try:
            context.load_cert_chain(certificate_file, key_file, refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise WebConfigError(
                    path, key_line, "the key is not the key of the certificate"
                ) from error
            line = options.certificate.text.line
            why = f"the certificate and its key are not usable: {_ssl_error_reason(error)}"
            raise WebConfigError(path, line, why) from error


def _load_authority(
    context: ssl.SSLContext, path: str, ca: Material, files: WebConfigFiles
) -> None:
    with _content_as_file(_read_pem(path, ca, files, b"CERTIFICATE-----")) as file:
        try:
            context.load_verify_locations(file)
        except ssl.SSLError as error:
            why = f"the client CA is not usable: {_ssl_error_reason(error)}"
            raise WebConfigError(path, ca.text.line, why) from error


def _read_pem(path: str, material: Material, files: WebConfigFiles, marker: bytes) -> bytes:
    line = material.text.line
    if material.is_inline:
        where, content = "this", material.text.value.encode()
    else:
        where = os.path.join(os.path.dirname(path), material.text.value)
        try:
            content = files.read(where)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise WebConfigError(path, line, f"{where}: {why}") from error
    if marker not in content:
        kind = marker.decode().removesuffix("-----").lower()
        raise WebConfigError(path, line, f"{where} holds no PEM {kind}")
    return content


def _try_handshake(context: ssl.SSLContext, path: str, line: int) -> None:
    """Shake hands with ourselves: suites, curve and key may each be fine, and not fit together."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * _MOST_FLIGHTS:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
                return  # as it should: all else was agreed on by then
            why = f"no client could connect with this certificate: {_ssl_error_reason(error)}"
            raise WebConfigError(path, line, why) from error


@contextmanager
def _content_as_file(content: bytes) -> Generator[str]:
    """Give bytes a path: OpenSSL reads what was checked and remembered, not a later file."""
    descriptor = os.memfd_create("gpulock-pem")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _ssl_error_reason(error: ssl.SSLError) -> str:
    return str(error.reason or error).replace("_", " ").lower()
