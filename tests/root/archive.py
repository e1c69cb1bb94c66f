# SPDX-License-Identifier: Apache-2.0
"""Debian's archive by the standard library alone: which packages, and their files, verified.

It runs before anything is installed, on whatever Linux: nothing of apt or dpkg is used. What the
archive says is believed by its signature (gpgv or sqv), each package by its SHA-256.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES = Path("/etc/apt")
TRIES = 4
FIELDS = re.compile(
    r"^(Package|Version|Architecture|Essential|(?:Pre-)?Depends|Provides|Filename|SHA256): (.*)$",
    re.MULTILINE,
)
URI = re.compile(r"^(?:URIs: *|deb(?: +\[[^\]]*\])? +)(https?://\S+/debian/?)(?= |$)", re.MULTILINE)
# What a package asks for that no test starts: mail, most of Perl, what configures packages.
LEFT_OUT = frozenset(
    {"adduser", "apt", "bsd-mailx", "debconf", "default-logind", "default-mta", "exim4-base"}
    | {"exim4-config", "exim4-daemon-light", "mailutils", "perl", "systemd-sysv", "ucf"}
)


class ArchiveError(Exception):
    """Say in one sentence what of Debian's archive is not to be had."""


def find_mirror() -> str:
    """Return the archive of this machine's own Debian packages, or raise ArchiveError."""
    given = os.environ.get("GPULOCK_MIRROR")
    if given:
        return given.rstrip("/")
    for path in (SOURCES / "sources.list", *sorted(SOURCES.glob("sources.list.d/*"))):
        match = URI.search(path.read_text()) if path.is_file() else None
        if match:
            return match[1].rstrip("/")
    raise ArchiveError(f"no Debian archive in {SOURCES}: set GPULOCK_MIRROR to one's URL")


def download(url: str) -> bytes:
    """Return what is behind a URL; a mirror fails now and then, for some seconds."""
    fault: OSError | None = None
    for wait in range(TRIES):
        time.sleep(wait)
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refused:
            fault = refused
            if refused.code == 404:
                break
        except OSError as failed:
            fault = failed
    raise ArchiveError(f"{url} cannot be fetched: {fault}")


def why_not_signed(file: Path, signed: Path) -> str:
    """Write what Debian has signed of a file; return why nobody has, or nothing.

    By gpgv, or sqv, which Debian has from 13 on. Raises ArchiveError where neither is there.
    """
    gpgv, sqv = shutil.which("gpgv"), shutil.which("sqv")
    if not KEYS.exists() or not (gpgv or sqv):
        raise ArchiveError(f"gpgv or sqv and {KEYS} are needed to verify Debian's packages")
    about = ["--keyring", str(KEYS), "--output", str(signed)]
    if gpgv:
        command = [gpgv, "-q", "--status-fd", "2", *about, str(file)]
    else:
        command = [str(sqv), *about, "--cleartext", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # An older Debian lacks the key of a newer one, which signs as well: gpgv ends with 2 then.
    is_good = is_signed_by_a_key(done.stderr) if gpgv else done.returncode == 0
    return "" if is_good else done.stderr


def is_signed_by_a_key(status: str) -> bool:
    """Return whether a signature is valid and none is bad, by what gpgv says with --status-fd."""
    words = [line.split()[1] for line in status.splitlines() if line.startswith("[GNUPG:] ")]
    return "VALIDSIG" in words and "BADSIG" not in words


class Archive:
    """One component of a release of Debian for one kind of machine, by its signed index."""

    def __init__(
        self, release: str, cache: Path, component: str = "main", machine: str = "amd64"
    ) -> None:
        self._mirror = find_mirror()
        self._cache = cache
        self._index: dict[str, dict[str, str]] = {}
        self._providers: dict[str, list[str]] = {}
        name = f"{component}/binary-{machine}/Packages.xz"
        digest = self._signed_digests(release).get(name)
        data = download(f"{self._mirror}/dists/{release}/{name}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise ArchiveError(f"{self._mirror}: {name} of {release} is not the signed one")
        for paragraph in lzma.decompress(data).decode().split("\n\n"):
            package = dict(FIELDS.findall(paragraph))
            if not package:
                continue
            self._index.setdefault(package["Package"], package)
            for provided in package.get("Provides", "").split(","):
                if provided.strip():
                    self._providers.setdefault(provided.split()[0], []).append(package["Package"])

    def _signed_digests(self, release: str) -> dict[str, str]:
        """Return the SHA-256 of each index by name, of a file that Debian signed."""
        url = f"{self._mirror}/dists/{release}/InRelease"
        with tempfile.TemporaryDirectory() as folder:
            file, signed = Path(folder, "InRelease"), Path(folder, "signed")
            file.write_bytes(download(url))
            if why := why_not_signed(file, signed):
                raise ArchiveError(f"{self._mirror}: the signature of {release} is bad: {why}")
            text = signed.read_text()
        lines = [line.split() for line in text.splitlines()]
        return {words[2]: words[0] for words in lines if len(words) == 3 and len(words[0]) == 64}

    def essential(self) -> list[str]:
        """Return the packages that every Debian has."""
        return [name for name, one in self._index.items() if one.get("Essential") == "yes"]

    def resolve(self, names: Iterable[str]) -> list[str]:
        """Return these packages and all they depend on; raise ArchiveError for an unknown one."""
        named, chosen = {*names}, set[str]()
        todo = [*named]
        while todo:
            name = todo.pop()
            if name in chosen or name in LEFT_OUT - named:
                continue
            package = self._index.get(name)
            if package is None:
                raise ArchiveError(f"Debian has no package {name}")
            chosen.add(name)
            depends = f"{package.get('Pre-Depends', '')},{package.get('Depends', '')}"
            for group in depends.split(","):
                wanted = [re.split(r"[ (:]", one.strip())[0] for one in group.split("|")]
                todo += self._choose([one for one in wanted if one], chosen)
        return sorted(chosen)

    def _choose(self, wanted: list[str], chosen: set[str]) -> list[str]:
        """Return the package for a dependency, none where one of it is chosen already."""
        if any(name in chosen or name in LEFT_OUT for name in wanted):
            return []
        for name in wanted:
            if name in self._index:
                return [name]
            if name in self._providers:
                return self._providers[name][:1]
        return []

    def status(self, names: Iterable[str]) -> str:
        """Return what dpkg's own file says of installed packages: it installs others."""
        lines = []
        for name in names:
            package = self._index[name]
            lines += [f"Package: {name}", "Status: install ok installed"]
            lines += ["Maintainer: Debian", "Description: -"]
            fields = ("Version", "Architecture", "Provides")
            lines += [f"{field}: {package[field]}" for field in fields if field in package]
            lines.append("")
        return "\n".join(lines)

    def fetch(self, names: Iterable[str]) -> list[Path]:
        """Return the packages' files, fetched where the cache has them not."""
        self._cache.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            return list(threads.map(self._fetch_one, names))

    def _fetch_one(self, name: str) -> Path:
        package = self._index[name]
        path = self._cache / os.path.basename(package["Filename"])
        if not path.exists():
            data = download(f"{self._mirror}/{package['Filename']}")
            if hashlib.sha256(data).hexdigest() != package["SHA256"]:
                raise ArchiveError(f"{package['Filename']} is not the signed one")
            new = path.with_name(f".{path.name}.{os.getpid()}")
            new.write_bytes(data)
            new.rename(path)
        return path


def data_member(deb: bytes) -> tuple[str, bytes]:
    """Return name and bytes of the archive of files in a .deb, which is an ar(5) archive."""
    at = 8
    while at < len(deb):
        name, size = deb[at : at + 16].decode().strip().rstrip("/"), int(deb[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return name, deb[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ArchiveError("a package without files")
