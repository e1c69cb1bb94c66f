#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dpkg: configure, triggered, or abort-*; rpm: the number of versions there are now.
set -e
case ${1:-} in
abort-*) exit 0 ;;
configure) # of a .deb, at its first installation: there it brings no conffile, about which dpkg would ask
    file=/etc/gpulock/gpulock.conf
    [ -n "${2:-}" ] || [ -e "$file" ] || [ -L "$file" ] || install -D -m 644 "/usr/lib/gpulock/etc$file" "$file"
    ;;
esac
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers gpulock.conf || true # the services' user; the services themselves are the administrator's to start
fi
if ! /usr/lib/gpulock/setup; then
    [ "${1:-}" = triggered ] || exit 1 # an upgrade of Python may go on
fi
