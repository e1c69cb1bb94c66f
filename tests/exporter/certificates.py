# SPDX-License-Identifier: Apache-2.0
"""Certificates for the tests, made by the openssl program: two authorities, servers and clients."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

SERVER_NAMES = "DNS:localhost,IP:127.0.0.1,IP:::1"


def make_authority(folder: Path, name: str) -> Path:
    """Make a certificate authority; return its certificate."""
    _openssl(folder, f"req -x509 -days 2 -subj /CN={name} -out {name}.pem", name)
    return folder / f"{name}.pem"


def make_certificate(folder: Path, name: str, authority: Path, names: str = SERVER_NAMES) -> Path:
    """Make a certificate and its key beside it (.key), signed by an authority."""
    options = f"-subj /CN={name} -addext subjectAltName={names} -days 2"
    signer = f"-CA {authority} -CAkey {authority.with_suffix('.key')}"
    usage = "-addext basicConstraints=critical,CA:FALSE"
    _openssl(folder, f"req -x509 {options} {usage} {signer} -out {name}.pem", name)
    return folder / f"{name}.pem"


def make_expired(folder: Path, name: str, authority: Path) -> Path:
    """Make a certificate whose time is over."""
    request, out = folder / f"{name}.csr", folder / f"{name}.pem"
    _openssl(folder, f"req -new -subj /CN={name} -out {request}", name)
    signer = f"-CA {authority} -CAkey {authority.with_suffix('.key')} -CAcreateserial"
    _run(folder, f"x509 -req -in {request} {signer} -days -1 -out {out}")
    return out


def trusting(authority: Path, client: Path | None = None) -> ssl.SSLContext:
    """Return a client's context that trusts one authority, and shows a certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    if client is not None:
        context.load_cert_chain(client, client.with_suffix(".key"))
    return context


def _openssl(folder: Path, command: str, name: str) -> None:
    key = f"-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key"
    _run(folder, f"{command} {key}")


def _run(folder: Path, command: str) -> None:
    done = subprocess.run(
        ["openssl", *command.split()], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
