# SPDX-License-Identifier: Apache-2.0
"""Make the private root of the tests: a Debian with both schedulers, and gpulock's Python packages.

    python3 -m tests.root.build ROOT           prints the folders of its layers, the uppermost first
    python3 -m tests.root.build index-files    prints by what this machine's pip reaches its index

Layers are kept in the user's cache and made once for a list of packages and a pyproject.toml.
Packages are unpacked, none is configured: what their scripts would do, as far as a daemon or a test
needs it, is `finish`. Needs root, python3, tar, and gpgv or sqv.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.root.archive import Archive, ArchiveError, data_member
from tests.root.packages import LAYERS, Layer

CHECKOUT = Path(__file__).resolve().parents[2]
PLACE = "/checkout"  # of the checkout, in the root
VENV = "/venv"  # in the root
MARK = ".gpulock-tests"  # in the root: by which a test knows that it is in one
DAY = 86400.0  # seconds without a use, after which an earlier form of a layer goes
USERS = {"munge": 901, "sgeadmin": 902, "slurm": 64030, "messagebus": 903}
FOLDERS = (
    "proc sys dev run tmp var/tmp root home srv mnt etc/munge var/lib/munge var/log/munge"
    " etc/slurm var/spool/slurmd var/lib/dpkg/info var/lib/dpkg/updates"
    " usr/local/bin usr/local/sbin usr/local/lib opt"
)
LINKS = {"awk": "mawk", "nawk": "mawk", "csh": "tcsh", "cc": "gcc", "which": "which.debianutils"}
PAM = ("account", "auth", "password", "session")
UNREAD = ("./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*", "./usr/share/info/*")
# How this machine reaches a package index, which the root's pip uses too.
SHOWN = ("/etc/resolv.conf", "/etc/ssl", "/etc/pip.conf", "/usr/share/ca-certificates")

_INSTALL = """
set -eu
root=$1 checkout=$2 package=$3 venv=$4
place=${package%[*}
shift 4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir -p "$root$place"
mount --rbind "$checkout" "$root$place"
for shown; do
    mkdir -p "$root${shown%/*}"
    if [ -d "$shown" ]; then mkdir -p "$root$shown"; else touch "$root$shown"; fi
    mount --bind "$shown" "$root$shown"
done
chroot "$root" python3 -m venv "$venv"
chroot "$root" "$venv/bin/pip" install -qq "pip>=22.3" # the first that needs no setup.py
exec chroot "$root" "$venv/bin/pip" install -qq --editable "$package"
"""


def cache_folder() -> Path:
    """Return where layers and packages are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("GPULOCK_ROOTS") or f"{base}/gpulock-tests")


def recipe(name: str) -> str:
    """Return the name of a layer's folder, by all that it depends on."""
    layer = LAYERS[name]
    digest = hashlib.sha256(repr((layer, recipe(layer.below) if layer.below else "")).encode())
    digest.update(Path(__file__).read_bytes())
    if layer.extra:
        digest.update((CHECKOUT / "pyproject.toml").read_bytes())
    return f"{name}-{digest.hexdigest()[:12]}"


def build(name: str) -> list[Path]:
    """Return the layers of a root, the uppermost first; what the cache has not is made."""
    below = LAYERS[name].below
    layers = build(below) if below else []
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / recipe(name)
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another clone's tests may make it just now
        if not folder.exists():
            new = cache / f".{folder.name}.new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            _make(LAYERS[name], new, cache / "debs")
            new.rename(folder)
        os.utime(folder)
        for path in cache.glob(f"{name}-*"):
            if path.stat().st_mtime < time.time() - DAY:  # no run takes so long
                shutil.rmtree(path, ignore_errors=True)
    return [folder, *layers]


def _make(layer: Layer, folder: Path, cache: Path) -> None:
    archive = Archive(layer.release, cache)
    lower = LAYERS[layer.below].packages if layer.below else ()
    names = archive.resolve([*layer.packages, *lower, *archive.essential()])
    there = archive.resolve([*lower, *archive.essential()]) if layer.below else []
    _merge_usr(folder)
    unpack(archive.fetch(sorted({*names} - {*there})), folder)
    for other in layer.others:
        beside = Archive(other.release, cache, other.component, other.machine)
        top = folder / "srv" / other.folder
        _merge_usr(top)
        # what one of contrib needs is in the root
        alone = other.component != "main"
        unpack(beside.fetch(other.packages if alone else beside.resolve(other.packages)), top)
        _make_folders(top)
    if not layer.below:
        finish(folder)
    (folder / "var/lib/dpkg").mkdir(parents=True, exist_ok=True)
    (folder / "var/lib/dpkg/status").write_text(archive.status(names))
    (folder / MARK).touch()
    if layer.extra:
        install_python(folder, layer)


def _merge_usr(root: Path) -> None:
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")


def _make_folders(root: Path) -> None:
    for name in FOLDERS.split():
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)


def unpack(files: Sequence[Path], root: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda file: _unpack_one(file, root), files))


def _unpack_one(file: Path, root: Path) -> None:
    name, data = data_member(file.read_bytes())
    tar = ["tar", "-x", "-C", str(root), "--keep-directory-symlink", "--numeric-owner"]
    tar += [f"--exclude={place}" for place in UNREAD]
    if name.endswith(".gz"):
        tar.append("-z")
    elif name.endswith(".xz"):
        data = lzma.decompress(data)
    else:
        raise ArchiveError(f"{file.name}: {name} is of no format that Python unpacks")
    done = subprocess.run(tar, input=data, capture_output=True, check=False)
    if done.returncode != 0:
        raise ArchiveError(f"{file.name} cannot be unpacked: {done.stderr.decode()}")


def finish(root: Path) -> None:
    """Do what the packages' scripts would have done, as far as a daemon or a test needs it."""
    for folder in ("usr/bin", "usr/sbin"):
        for path in (root / folder).glob("*-wlm"):
            _link(path.with_name(path.name[: -len("-wlm")]), path.name)
    for name, target in LINKS.items():
        _link(root / "usr/bin" / name, target)
    _make_folders(root)
    for name, target in (("run", "/run"), ("lock", "/run/lock")):
        shutil.rmtree(root / "var" / name, ignore_errors=True)
        _link(root / "var" / name, target)
    _link(root / "etc/localtime", "/usr/share/zoneinfo/Etc/UTC")
    masters = root / "usr/share/base-passwd"
    passwd = (masters / "passwd.master").read_text().replace(":*:", ":x:")
    group = (masters / "group.master").read_text().replace(":*:", ":x:")
    for name, number in USERS.items():
        passwd += f"{name}:x:{number}:{number}::/nonexistent:/usr/sbin/nologin\n"
        group += f"{name}:x:{number}:\n"
    shadow = "".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in passwd.splitlines())
    files = {"passwd": passwd, "group": group, "shadow": shadow, "hosts": "127.0.0.1 localhost\n"}
    files["hostname"] = "gpulock-tests\n"
    files["nsswitch.conf"] = "hosts: files dns\n" + "".join(
        f"{name}: files\n" for name in ("passwd", "group", "shadow", "services", "protocols")
    )
    files |= {f"pam.d/common-{name}": f"{name} required pam_unix.so\n" for name in PAM}
    files["pam.d/common-session-noninteractive"] = files["pam.d/common-session"]
    for name, text in files.items():
        (root / "etc" / name).write_text(text)
    (root / "etc/shadow").chmod(0o640)
    shutil.copy(root / "usr/share/base-files/profile", root / "etc/profile")
    subprocess.run(["chroot", str(root), "/sbin/ldconfig"], check=True)
    places = [str(path)[len(str(root)) :] for path in root.glob("usr/lib/python3*")]
    compileall = ["python3", "-m", "compileall", "-q", *places]
    # some of Debian's own do not compile on purpose
    subprocess.run(["chroot", str(root), *compileall], check=False, stdout=subprocess.DEVNULL)


def _link(path: Path, target: str) -> None:
    if not path.is_symlink() and not path.exists():
        path.symlink_to(target)


def oldest_versions(project: str) -> str:
    """Return constraints of pip: the oldest versions that a pyproject.toml admits; pure.

    But of NVIDIA's binding: what later ones have is tested, and missing before.
    """
    needed = project[project.index("\ndependencies = [") : project.index("\ntest = [")]
    pairs = re.findall(r'(?m)^    "([\w-]+)>=([\d.]+)', needed)
    return "".join(f"{name}=={version}\n" for name, version in pairs if name != "nvidia-ml-py")


def install_python(root: Path, layer: Layer) -> None:
    """Install this checkout, editable, and what its tests need, as this machine's pip would."""
    env = {**os.environ, "HOME": "/root", "PIP_ROOT_USER_ACTION": "ignore"}
    if layer.oldest:
        project = (CHECKOUT / "pyproject.toml").read_text()
        (root / "oldest.txt").write_text(oldest_versions(project))
        env["PIP_CONSTRAINT"] = "/oldest.txt"
    shown = [place for place in index_files() if os.path.exists(place)]
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork"]
    words = (str(root), str(CHECKOUT), f"{PLACE}[{layer.extra}]", VENV, *shown)
    done = subprocess.run(
        [*unshare, "sh", "-c", _INSTALL, "install", *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ArchiveError(f"the Python packages cannot be installed: {done.stdout}{done.stderr}")


def index_files() -> list[str]:
    """Return the files and folders by which this machine's pip reaches its index."""
    names = ("PIP_CERT", "SSL_CERT_FILE", "PIP_FIND_LINKS")
    texts = [os.environ.get(name, "") for name in names]
    for path in ("/etc/pip.conf", os.path.expanduser("~/.config/pip/pip.conf")):
        if os.path.exists(path):
            texts.append(Path(path).read_text())
    return [*SHOWN, *sorted({place for text in texts for place in named_places(text)})]


def named_places(text: str) -> list[str]:
    """Return the folders and files that a configuration of pip names; pure."""
    words = text.replace("file://", " ").replace("=", " ").split()
    places = [word for word in words if word.startswith("/")]
    # an index's files lie beside its `simple`
    return [os.path.dirname(place) if place.endswith("/simple") else place for place in places]


def main() -> int:
    """Print the folders of a root, or in one sentence why there is none."""
    if sys.argv[1:] == ["index-files"]:
        print(*index_files())
        return 0
    try:
        print(*build(sys.argv[1]), sep=":")
    except (ArchiveError, OSError, subprocess.SubprocessError) as fault:
        print(f"no private root {sys.argv[1]}: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
