#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/together.sh SECONDS COMMAND COMMAND...
# Runs commands at the same time, prints what each wrote when that one is over, and fails where one did. What is not over
# after SECONDS is told with its processes and ended: a run that hangs must say where. An interrupt is passed on to each,
# and waited for: a lab is taken down by what put it up.
set -uo pipefail
# Each command in a process group of its own. Without job control a shell's background ignores SIGINT, and so does all
# below it; and to one process it would be of no use: unshare(1) blocks it, the lab is below that.
set -m

limit=$1
shift
logs=$(mktemp -d)
interrupt_all() {
    trap '' INT TERM # impatience must not end a lab half taken down
    for pid in $(jobs -p); do # the last may not be in $pids yet
        kill -INT -- "-$pid" 2>/dev/null
    done
}
# shellcheck disable=SC2317 # by the trap
interrupted() {
    interrupt_all
    wait
    [[ -z ${clock:-} ]] || kill -- "-$clock" 2>/dev/null # it would signal whoever has this pid by then
    rm -rf "$logs"
    exit 130
}
# shellcheck disable=SC2317 # by the trap
overdue() {
    kill -- "-$clock" 2>/dev/null # where another than the clock sent the signal
    echo "not over after $limit s; the processes of this machine, then what each command wrote:"
    # not their arguments: reading these waits for a process whose memory is locked
    ps -N --ppid 2 -o pid,ppid,pgid,stat,wchan:20,etime,comm --forest
    interrupt_all
    # One that an interrupt does not end is killed, so that what it wrote is told all the same.
    for _ in {1..300}; do
        [[ -n $(jobs -pr) ]] || break
        sleep 1
    done
    for pid in $(jobs -pr); do
        kill -KILL -- "-$pid" 2>/dev/null
    done
    for log in "$logs"/*; do
        [[ -e $log ]] && echo "-- $log" && cat "$log"
    done
    echo "-- the last words of each that was not over"
    for log in "$logs"/*; do
        [[ -e $log ]] && tail -n 4 "$log" | cut -c 1-300
    done
    rm -rf "$logs"
    exit 124
}
trap interrupted INT TERM
trap overdue ALRM
declare -A number
count=0
for command in "$@"; do
    log="$logs/$count"
    bash -c "exec $command" </dev/null >"$log" 2>&1 &
    number[$!]=$count
    ((count += 1))
done
{ sleep "$limit" && kill -ALRM $$; } </dev/null >/dev/null 2>&1 &
clock=$!
disown "$clock" # no job to wait for
failed=0
words=()
while ((${#number[@]})); do
    wait -n -p ended "${!number[@]}"
    status=$?
    [[ -n ${ended:-} && -n ${number[$ended]:-} ]] || continue
    ((status == 0)) || failed=$status
    log="$logs/${number[$ended]}"
    words[number[$ended]]=$(tail -n 1 "$log")
    cat "$log"
    rm -f "$log"
    unset "number[$ended]"
done
kill -- "-$clock" 2>/dev/null
rm -rf "$logs"
printf -v line '%s; ' "${words[@]}"
echo "${line%; }"
exit "$failed"
