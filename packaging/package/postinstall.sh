#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dpkg: configure, triggered, or abort-*; rpm: the number of versions there are now.
set -e
case ${1:-} in
abort-*) exit 0 ;;
esac
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers gpulock.conf || true # the services' user; the services themselves are the administrator's to start
fi
if ! /usr/lib/gpulock/setup; then
    [ "${1:-}" = triggered ] || exit 1 # an upgrade of Python may go on
fi
