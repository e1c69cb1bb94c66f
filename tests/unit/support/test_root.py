# SPDX-License-Identifier: Apache-2.0
"""The private root: from whose archive, of which packages, and believed by a signature alone."""

from __future__ import annotations

import hashlib
import lzma
import subprocess
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from tests.root.archive import Archive, ArchiveError, is_signed_by_a_key
from tests.root.build import oldest_versions
from tests.root.packages import LAYERS

CHECKOUT = Path(__file__).resolve().parents[3]
PACKAGES = "Package: slurmd\nFilename: pool/slurmd.deb\nSHA256: 00\n"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder that is an archive of Debian."""
    monkeypatch.setenv("GPULOCK_MIRROR", f"file://{tmp_path}/")
    index = tmp_path / "dists/some/main/binary-amd64"
    index.mkdir(parents=True)
    (index / "Packages.xz").write_bytes(lzma.compress(PACKAGES.encode()))
    (tmp_path / "dists/some/InRelease").write_text("-----BEGIN PGP SIGNED MESSAGE-----\n")
    return tmp_path


def signed(monkeypatch: pytest.MonkeyPatch, mirror: Path) -> Archive:
    """Return the archive, as if its keys were Debian's."""
    name = "main/binary-amd64/Packages.xz"
    data = (mirror / "dists/some" / name).read_bytes()
    digests = {name: hashlib.sha256(data).hexdigest()}
    monkeypatch.setattr(Archive, "_signed_digests", lambda self, release: digests)
    return Archive("some", mirror / "cache")


def test_an_archive_that_debian_did_not_sign_is_refused(mirror: Path) -> None:
    with pytest.raises(ArchiveError, match=r"signature of some is bad|needed to verify"):
        Archive("some", mirror / "cache")


STATUS = """\
[GNUPG:] NEWSIG
[GNUPG:] GOODSIG 6ED0E7B82643E131 Debian Archive Automatic Signing Key (12/bookworm)
[GNUPG:] VALIDSIG 4CB50190207B4758A3F73A796ED0E7B82643E131 2026-07-11
gpgv: Can't check signature: No public key
[GNUPG:] NEWSIG
"""
OF_A_NEWER = "[GNUPG:] ERRSIG 78DBA3BC47EF2265 1 8 01\n[GNUPG:] NO_PUBKEY 78DBA3BC47EF2265\n"
BAD = "[GNUPG:] BADSIG 6ED0E7B82643E131 Debian Archive Automatic Signing Key (12/bookworm)\n"


@pytest.mark.parametrize(
    ("status", "signed"),
    [
        (STATUS, True),
        (STATUS + OF_A_NEWER, True),
        (STATUS + BAD, False),
        (OF_A_NEWER, False),
        ("", False),
    ],
)
def test_one_key_that_this_debian_knows_is_enough(status: str, *, signed: bool) -> None:
    """Debian 11 has no key of Debian 13, which signs Debian 12 too."""
    assert is_signed_by_a_key(status) is signed


def test_a_package_of_another_content_is_refused(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mirror / "pool").mkdir()
    (mirror / "pool/slurmd.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(ArchiveError, match=r"slurmd\.deb is not the signed one"):
        signed(monkeypatch, mirror).fetch(["slurmd"])


@pytest.mark.root
@pytest.mark.parametrize(("words", "code"), [((), 0), (("chroot", "{0}"), 1)])
def test_a_chroot_is_no_place_for_a_private_root(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    """Who entered a lab there wrote to the cgroups of the machine around it."""
    refuse = f"source {CHECKOUT}/tests/root/cgroups.sh; refuse_chroot"
    enter = " ".join(words).format(tmp_path)
    script = f"mount --rbind / {tmp_path} && {enter} bash -c '{refuse}'"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "this is a chroot" in done.stderr) == (code, bool(code))


def test_the_oldest_versions_are_of_all_that_gpulock_needs() -> None:
    """What pyproject.toml admits is tried, by the root of the oldest Python."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    project = tomli.loads(text)["project"]
    lines = (*project["dependencies"], *project["optional-dependencies"]["web"])
    needed = {Requirement(line).name for line in lines}
    named = {line.partition("==")[0] for line in oldest_versions(text).splitlines()}
    assert named == needed - {"nvidia-ml-py"}
    assert LAYERS["bullseye"].oldest
