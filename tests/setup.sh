#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/setup.sh runtime|dev
# Makes .venv and installs this checkout into it, editable: with what gpulock needs to run, or also what its tests need.
# PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

die() {
    printf 'set-up: %s\n' "$*" >&2
    exit 1
}

# Prints the resolved interpreter and whether every user may run it, for one that is new enough; fails for any other.
# Hooks run as root for jobs of other users, and the tests run them as others: an interpreter below a home directory
# (pyenv, conda: /root is 0700) is one that only its owner can start.
probe='
import os, sys
if sys.version_info < (3, 9):
    sys.exit(1)
real = os.path.realpath(sys.executable)
paths = [real, os.path.realpath(os.__file__)]
folders = set()
for path in paths:
    while path != "/":
        path = os.path.dirname(path)
        folders.add(path)
shared = os.stat(real).st_mode & 0o005 == 0o005 and all(os.stat(f).st_mode & 0o001 for f in folders)
print("shared" if shared else "private", real)
'

find_python() {
    local name candidate answer fallback=''
    for name in ${PYTHON:-/usr/bin/python3 python3.13 python3.12 python3.11 python3.10 python3.9 python3}; do
        while read -r candidate; do
            answer=$("$candidate" -I -c "$probe" 2>/dev/null) || continue
            if [[ $answer == shared\ * ]]; then
                printf '%s\n' "${answer#* }"
                return
            fi
            fallback=${fallback:-${answer#* }}
        done < <(type -aP "$name")
    done
    [[ -n $fallback ]] || die 'no Python >= 3.9 found. Debian: apt-get install python3; Rocky: dnf install python3'
    printf 'set-up: note: no Python >= 3.9 that other users can run; taking %s\n' "$fallback" >&2
    printf '%s\n' "$fallback"
}

find_pip() {  # one that can install into another environment (--python: pip 22.3)
    local candidate
    while read -r candidate; do
        if "$candidate" -m pip --python "$candidate" --version >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done < <(type -aP python3 python3.13 python3.12 python3.11 python3.10 python3.9)
    return 1
}

make_venv() {
    local python pip_python pip_wheel
    python=$(find_python)
    rm -rf .venv
    # Debian splits ensurepip off into python3-venv.
    if ! "$python" -c 'from ensurepip import version' 2>/dev/null; then
        if pip_python=$(find_pip); then
            "$python" -m venv --without-pip .venv
            "$pip_python" -m pip --python .venv/bin/python install -qq pip
            return
        fi
        "$python" -m venv --without-pip .venv
        pip_wheel=$("$python" -m tests.root.pip_wheel) ||
            die "$python has neither ensurepip nor pip. Debian: apt-get install python3-venv"
        # Debian 11 splits distutils off as well, by which pip finds its folders in 3.9; later ones ask sysconfig.
        echo 'import sysconfig; sysconfig._PIP_USE_SYSCONFIG = True' \
            >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pip-asks-sysconfig.pth"
        PYTHONPATH=$pip_wheel .venv/bin/python -m pip install -qq pip
        return
    fi
    "$python" -m venv .venv
}

.venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
case ${1:-} in
runtime)
    .venv/bin/python -m pip install -qq --editable .
    touch .venv/.runtime
    ;;
dev)
    .venv/bin/python -m pip install -qq --editable '.[dev]'
    # For the double of NVIDIA's library.
    command -v cc >/dev/null || .venv/bin/python -m pip install -qq ziglang
    touch .venv/.runtime .venv/.dev
    ;;
*) die 'usage: tests/setup.sh runtime|dev' ;;
esac
printf '%s, %s\n' "$(.venv/bin/python --version)" "$(readlink -f .venv/bin/python)"
