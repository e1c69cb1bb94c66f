# SPDX-License-Identifier: Apache-2.0
"""The private root: from whose archive, of which packages, and believed by a signature alone."""

from __future__ import annotations

import hashlib
import lzma
import os
import subprocess
from pathlib import Path

import pytest

from tests.root.archive import (
    Archive,
    ArchiveError,
    data_member,
    find_mirror,
    is_signed_by_a_key,
)
from tests.root.build import DAY, KEPT, named_places, recipe, retire_old_forms
from tests.root.packages import LAYERS
from tests.steps import PLANS

CHECKOUT = Path(__file__).resolve().parents[3]
PACKAGES = """\
Package: slurmd
Version: 22.05
Architecture: amd64
Depends: libc6 (>= 2.36), munge | nothing, mail-agent
Filename: pool/slurmd.deb
SHA256: 00

Package: libc6
Essential: yes

Package: munge
Pre-Depends: libc6

Package: exim
Provides: mail-agent (= 1)
Depends: perl
"""


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


def test_packages_come_with_what_they_need_and_without_perl(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    debian = signed(monkeypatch, mirror)
    assert debian.resolve(["slurmd"]) == ["exim", "libc6", "munge", "slurmd"]
    assert debian.essential() == ["libc6"]
    assert "Package: slurmd\nStatus: install ok installed\n" in debian.status(["slurmd"])
    with pytest.raises(ArchiveError, match="no package gone"):
        debian.resolve(["gone"])


def test_a_package_of_another_content_is_refused(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mirror / "pool").mkdir()
    (mirror / "pool/slurmd.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(ArchiveError, match=r"slurmd\.deb is not the signed one"):
        signed(monkeypatch, mirror).fetch(["slurmd"])


def test_the_files_of_a_package_are_found_in_it() -> None:
    member = b"%-16s%-12s%-6s%-6s%-8s%-10d`\n"
    deb = b"!<arch>\n" + member % (b"debian-binary", b"0", b"0", b"0", b"644", 3) + b"2.0\n"
    deb += member % (b"data.tar.xz/", b"0", b"0", b"0", b"644", 4) + b"data"
    assert data_member(deb) == ("data.tar.xz", b"data")
    with pytest.raises(ArchiveError):
        data_member(b"!<arch>\n")


@pytest.mark.parametrize(
    ("name", "text", "mirror"),
    [
        (
            "sources.list",
            "deb [signed-by=/k] http://mirror.example/debian sid main\n",
            "http://mirror.example/debian",
        ),
        (
            "sources.list.d/x",
            "Types: deb\nURIs: http://mirror.example/debian/\n",
            "http://mirror.example/debian",
        ),
    ],
)
def test_the_archive_is_that_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, mirror: str
) -> None:
    monkeypatch.delenv("GPULOCK_MIRROR", raising=False)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert find_mirror(tmp_path) == mirror


def test_a_machine_without_an_archive_is_told_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPULOCK_MIRROR", raising=False)
    (tmp_path / "sources.list").write_text("URIs: http://mirror.example/debian-security\n")
    with pytest.raises(ArchiveError, match="set GPULOCK_MIRROR"):
        find_mirror(tmp_path)
    monkeypatch.setenv("GPULOCK_MIRROR", "http://mirror.example/debian/")
    assert find_mirror(tmp_path) == "http://mirror.example/debian"


def test_what_pips_configuration_names_is_shown_to_the_root() -> None:
    text = "[global]\ncert = /etc/ca.crt\nextra-index-url = file:///opt/pypi/simple https://mirror.example\n"
    assert named_places(text) == ["/etc/ca.crt", "/opt/pypi"]


def test_every_step_has_a_root_and_no_two_have_one_name() -> None:
    assert recipe("labs").startswith("labs-")
    for steps in PLANS.values():
        assert {step.root for step in steps} <= {*LAYERS}
        assert len({step.name for step in steps}) == len(steps)


NOW = 1_000_000_000.0
HOLD = f"source {Path(__file__).parents[2]}/root/hold.sh; hold_layers $1 && echo held && read -r"


def make_form(cache: Path, name: str, age: float) -> Path:
    """Make a form of a layer that was used that many seconds ago."""
    (cache / name / "usr").mkdir(parents=True)
    os.utime(cache / name, (NOW - age, NOW - age))
    return cache / name


def kept_forms(cache: Path) -> set[str]:
    """Retire the old forms of the layer `labs`; return what is not to be removed."""
    retired = retire_old_forms("labs", cache, NOW)
    return {path.name for path in cache.iterdir() if path not in retired}


def test_a_form_of_a_layer_that_nobody_used_for_a_day_is_removed(tmp_path: Path) -> None:
    make_form(tmp_path, "labs-1", DAY - 1)
    make_form(tmp_path, "labs-2", DAY + 1)
    make_form(tmp_path, "sid-3", DAY + 1)
    assert kept_forms(tmp_path) == {"labs-1", "sid-3"}


def test_of_a_days_many_forms_the_last_used_ones_are_kept(tmp_path: Path) -> None:
    for age in range(KEPT + 3):
        make_form(tmp_path, f"labs-{age}", age)
    assert kept_forms(tmp_path) == {f"labs-{age}" for age in range(KEPT)}


def test_a_form_that_a_run_uses_outlives_its_day(tmp_path: Path) -> None:
    labs, below = (make_form(tmp_path, name, DAY + 1) for name in ("labs-1", "labs-below"))
    command = ["bash", "-c", HOLD, "hold", f"{labs}:{below}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stdout.readline() == b"held\n"
        assert kept_forms(tmp_path) == {"labs-1", "labs-below"}
        run.communicate(b"\n")
    assert kept_forms(tmp_path) == set()


@pytest.mark.parametrize("follower", ["none", "another"])
def test_a_run_does_not_use_a_form_that_was_removed_meanwhile(
    tmp_path: Path, follower: str
) -> None:
    labs = make_form(tmp_path, "labs-1", 0)
    wrapped = f'flock() {{ command flock "$@" && mv {labs} {tmp_path}/removed; }}; '
    if follower == "another":
        wrapped = wrapped.replace("; }", f" && mkdir {labs}; }}")
    command = ["bash", "-c", wrapped + HOLD, "hold", str(labs)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 1
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 1


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    make_form(tmp_path, "labs-1", 0)
    make_form(tmp_path, ".labs-2.new", 0)
    make_form(tmp_path, ".labs-3.old", 0)
    make_form(tmp_path, ".sid-4.new", 0)
    assert kept_forms(tmp_path) == {"labs-1", ".sid-4.new"}


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
