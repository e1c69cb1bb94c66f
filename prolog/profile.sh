# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# The GPUs of a qlogin: Grid Engine gives its shell none of the job's environment.
#
# /etc/profile.d/gpulock.sh, read by every login shell: no process is started. A shell belongs to
# the job whose supplementary group it has; that job's variables stand in execd's spool directory,
# and are exported as they are, never evaluated. A group of Grid Engine's without a job to be read
# gets an empty mask. A shell that has our variables already is left alone.
_gpulock_login() {
	while read -r _gpulock_name _gpulock_groups; do
		[ "$_gpulock_name" != Groups: ] || break
		_gpulock_groups=
	done </proc/self/status || return 0
	_gpulock_job=
	for _gpulock_file in '@EXECD_SPOOL@'/active_jobs/*/addgrpid \
		'@EXECD_SPOOL@'/active_jobs/*/*/addgrpid; do
		[ -r "$_gpulock_file" ] || continue
		read -r _gpulock_gid <"$_gpulock_file" || continue
		case " $_gpulock_groups " in
		*" $_gpulock_gid "*) _gpulock_job="${_gpulock_job:+/dev/null}${_gpulock_file%/addgrpid}" ;;
		esac
	done
	if [ -z "$_gpulock_job" ]; then
		_gpulock_mine || return 0
	elif [ -r "$_gpulock_job/environment" ]; then
		while IFS= read -r _gpulock_line; do
			case $_gpulock_line in
			*\\*) ;;
			@NAMES@)
				# shellcheck disable=SC2163 # the name is in the line: NAME=value
				export "$_gpulock_line"
				;;
			esac
		done <"$_gpulock_job/environment"
		return 0
	fi
	export CUDA_VISIBLE_DEVICES= NVIDIA_VISIBLE_DEVICES=void
}

_gpulock_mine() { # whether one of our groups is one that execd hands out
	for _gpulock_gid in $_gpulock_groups; do
		for _gpulock_range in @GID_RANGES@; do
			[ "$_gpulock_gid" -lt "${_gpulock_range%-*}" ] ||
				[ "$_gpulock_gid" -gt "${_gpulock_range#*-}" ] || return 0
		done
	done
	return 1
}

[ -n "${GPULOCK_DEVICES+x}" ] || _gpulock_login
unset -f _gpulock_login _gpulock_mine
unset _gpulock_name _gpulock_groups _gpulock_job _gpulock_file _gpulock_gid _gpulock_line \
	_gpulock_range
