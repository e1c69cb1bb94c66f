#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/pythons.sh VERSION...
# Runs the demo and the quick unit tests on other Pythons (3.9, 3.13), each in an environment of its own below
# build/pythons. An interpreter of this machine serves; where there is none, that of a Debian root does, as root.
# Left out is what judges the source, its units and its shell scripts, the same for all, and what another user would
# have to run: an interpreter below a home directory is its owner's alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
source_alone=(exporter/metrics/test_dashboards.py install/systemd/test_units.py
    repository/test_{docs,examples,layers,structure,together}.py)
declare -A releases=([3.9]=bullseye [3.11]=bookworm [3.13]=trixie [3.14]=sid)
# One for all: a Debian's own is too old, or in a package that is not there.
pip=build/pythons/pip-25.3
certificates=/etc/ssl/certs/ca-certificates.crt

find_python() {
    local candidate
    while read -r candidate; do
        # A shim of pyenv names a program that it may not have.
        if [[ $("$candidate" -IS -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]]; then
            printf '%s\n' "$candidate"
            return
        fi
    done < <(type -aP "python$1" || true; ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python3 2>/dev/null || true)
    return 1
}

die() {  # VERSION [WHERE [OR]]
    echo "make pythons: there is no Python $1${2:-}: put python$1 on PATH, ${3:-}or leave it out of PYTHONS=" >&2
    exit 1
}

run_in_root() {  # with this machine's way to the package index
    local release=${releases[$1]:-}
    [[ -n $release && -z ${DEBIAN:-} ]] || die "$1" "${DEBIAN:+ in Debian $DEBIAN}"
    [[ $(id -u) == 0 ]] || die "$1" '' 'run it as root, with which it makes a Debian that has it, '
    local place shown=''
    for place in /etc/resolv.conf /etc/ssl/certs "${PIP_CERT:-}" "${SSL_CERT_FILE:-}" \
        $(.venv/bin/python -m pip config debug | sed -n 's/^ *\(.*\), exists: True$/\1/p') \
        $(.venv/bin/python -m pip config list | grep -oE "/[^' ,\\]+" | # what those name; an index's files lie beside it
            sed 's,^///\(.*\)/[^/]*$,/\1,'); do
        [[ ! -e $place ]] || shown+=" $place"
    done
    DEBIAN=$release SHOWN=$shown tests/release.sh "$release" tests/pythons.sh "$1"
}

[[ -e $pip/pip/__pip-runner__.py ]] || .venv/bin/python -m pip install -qq --target "$pip" "pip==${pip##*-}"
for version in "$@"; do
    if ! python=$(find_python "$version"); then
        run_in_root "$version"
        continue
    fi
    place=build/pythons/$version${DEBIAN:+-$DEBIAN}
    if [[ ! -e $place/.ready || pyproject.toml -nt $place/.ready ]]; then
        "$python" -m venv --without-pip --clear "$place"
        [[ ! -e $certificates || -n ${PIP_CERT:-} ]] || export PIP_CERT=$certificates
        "$place/bin/python" "$pip/pip/__pip-runner__.py" install -qq --editable '.[test]'
        touch "$place/.ready"
    fi
    "$place/bin/python" --version
    "$place/bin/gpulock" demo >/dev/null
    "$place/bin/pytest" -q -p no:cacheprovider -n "$(nproc)" "${source_alone[@]/#/--ignore=tests/unit/}" \
        -m "$QUICK and not another_user" tests/unit
done
