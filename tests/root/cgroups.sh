# SPDX-License-Identifier: Apache-2.0
# Sourced by enter.sh and cell.sh: cgroups of one's own in every hierarchy, and their mounts.

# enter_cgroups NAME: makes a cgroup NAME below this process's own, wherever it may, and goes there; `groups` has them.
enter_cgroups() {
    groups=()
    local names at place group file
    while IFS=: read -r _ names at; do
        place=$(awk -v names="$names" '{ split($0, halves, " - "); split(halves[2], type, " "); split(halves[1], mount, " ") }
            (names == "" && type[1] == "cgroup2") || (type[1] == "cgroup" && ("," type[3] ",") ~ ("," names ",")) {
                print mount[5]; exit }' /proc/self/mountinfo)
        [[ -n $place && -d $place$at ]] || continue
        group=${place%/}${at%/}/$1
        mkdir "$group" 2>/dev/null || continue
        for file in cpuset.cpus cpuset.mems; do
            [[ ! -e $group/$file ]] || cat "${group%/*}/$file" >"$group/$file" 2>/dev/null || true
        done
        groups+=("$group")
    done </proc/self/cgroup
    for group in "${groups[@]}"; do echo $$ >"$group/cgroup.procs"; done
}

# leave_cgroups: goes back and removes them, once the last process in there has gone.
leave_cgroups() {
    local group
    for group in "${groups[@]}"; do
        echo $$ >"${group%/*}/cgroup.procs" || true
        for _ in {1..50}; do
            find "$group" -depth -type d -exec rmdir {} + && break
            sleep 0.1
        done
    done 2>/dev/null
}

# mount_cgroups PLACE: mounts what this cgroup namespace sees. CGROUPS=2: version 2 alone.
mount_cgroups() {
    local names place
    if [[ ${CGROUPS:-} == 2 || -e /sys/fs/cgroup/cgroup.controllers ]]; then
        mount -t cgroup2 cgroup2 "$1"
        # slurmd empties the cgroup of PID 1, and fails where one ends in there meanwhile.
        mkdir "$1/init" "$1/lab"
        echo 0 >"$1/init/cgroup.procs"
        return
    fi
    mount -t tmpfs tmpfs "$1"
    while IFS=: read -r _ names _; do
        place=$1/${names#name=}
        [[ -n $names ]] || place=$1/unified
        mkdir "$place"
        if [[ -z $names ]]; then
            mount -t cgroup2 cgroup2 "$place"
        else
            mount -t cgroup -o "$names" cgroup "$place" 2>/dev/null || rmdir "$place"
        fi
    done </proc/self/cgroup
}

refuse_chroot() { # who enters a mount namespace leaves a chroot, and what a lab does there the machine around it gets
    local mount='exec 9</; grep mnt_id /proc/self/fdinfo/9'
    [[ $(bash -c "$mount") == $(nsenter --mount=/proc/self/ns/mnt bash -c "$mount") ]] && return
    echo "this is a chroot, from which a lab would reach the machine around it: use the machine itself, or a container" >&2
    return 1
}
