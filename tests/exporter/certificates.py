# SPDX-License-Identifier: Apache-2.0
"""Certificates for the tests, made by the openssl program: two authorities, servers and clients."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

SERVER_NAMES = "DNS:localhost,IP:127.0.0.1,IP:::1"
# What X.509 wants of each: Python 3.13 asks for all of it (VERIFY_X509_STRICT).
AUTHORITY = "[ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n"
LEAF = """basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
"""


def make_authority(folder: Path, name: str) -> Path:
    """Make a certificate authority; return its certificate."""
    config = folder / f"{name}.cnf"
    config.write_text(f"[req]\ndistinguished_name=ca\n{AUTHORITY}subjectKeyIdentifier=hash\n")
    options = f"-config {config} -extensions ca -days 2 -subj /CN={name}"
    _openssl(folder, f"req -x509 {options} -out {name}.pem", name)
    return folder / f"{name}.pem"


def make_certificate(folder: Path, name: str, authority: Path, names: str = SERVER_NAMES) -> Path:
    """Make a certificate and its key beside it (.key), signed by an authority."""
    request, out, wanted = (folder / f"{name}.{end}" for end in ("csr", "pem", "ext"))
    wanted.write_text(f"{LEAF}subjectAltName={names}\n")
    _openssl(folder, f"req -new -subj /CN={name} -out {request}", name)
    signer = f"-CA {authority} -CAkey {authority.with_suffix('.key')} -CAcreateserial"
    _run(folder, f"x509 -req -days 2 {signer} -extfile {wanted} -in {request} -out {out}")
    return out


def trusting(authority: Path, client: Path | None = None) -> ssl.SSLContext:
    """Return a client's context that trusts one authority, and shows a certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    if client is not None:
        context.load_cert_chain(client, client.with_suffix(".key"))
    return context


def write_web_config(folder: Path, authority: Path, more: str = "", name: str = "server") -> Path:
    """Write a web-config.yml that serves with a certificate beside its authority's."""
    own, path = authority.with_name(f"{name}.pem"), folder / "web-config.yml"
    keys = f"  cert_file: {own}\n  key_file: {own.with_suffix('.key')}\n"
    path.write_text(f"tls_server_config:\n{keys}{more}")
    return path


def _openssl(folder: Path, command: str, name: str) -> None:
    key = f"-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key"
    _run(folder, f"{command} {key}")


def _run(folder: Path, command: str) -> None:
    done = subprocess.run(
        ["openssl", *command.split()], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
