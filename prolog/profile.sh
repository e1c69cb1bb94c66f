# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=dash
# The GPUs of a qlogin: Grid Engine gives its shell none of the job's environment.
#
# /etc/profile.d/gpulock.sh, read by login shells: no process is started. A shell belongs to the job
# whose supplementary group it has; that job's variables stand in execd's spool directory, and are
# exported as they are, never evaluated. A group of Grid Engine's without a job to be read gets an
# empty mask. A shell that has our variables already is left alone. zsh reads it as well, where its
# own start file names it. gpulock.csh runs it as a program, with _gpulock_csh set: then name and
# value are printed, each on a line; a value with a character that csh might read is empty.
_gpulock_spool='@EXECD_SPOOL@'
_gpulock_ranges='@GID_RANGES@'

_gpulock_login() {
	[ -z "${ZSH_VERSION-}" ] || emulate -L sh
	while read -r _gpulock_name _gpulock_groups; do
		[ "$_gpulock_name" != Groups: ] || break
		_gpulock_groups=
	done </proc/self/status || return 0
	_gpulock_job=
	for _gpulock_file in "$_gpulock_spool"/active_jobs/*/addgrpid \
		"$_gpulock_spool"/active_jobs/*/*/addgrpid; do
		[ -r "$_gpulock_file" ] || continue
		read -r _gpulock_gid <"$_gpulock_file" || continue
		case " $_gpulock_groups " in
		*" $_gpulock_gid "*) # the newest: groups are handed out again, folders may be left over
			[ "$_gpulock_job/addgrpid" -nt "$_gpulock_file" ] ||
				_gpulock_job=${_gpulock_file%/addgrpid}
			;;
		esac
	done
	if [ -z "$_gpulock_job" ]; then
		_gpulock_mine || return 0
	elif [ -r "$_gpulock_job/environment" ]; then
		_gpulock_export <"$_gpulock_job/environment"
		return 0
	fi
	_gpulock_set CUDA_VISIBLE_DEVICES=
	_gpulock_set NVIDIA_VISIBLE_DEVICES=void
	echo 'gpulock: no job can be read for this login: it has no GPU' >&2
}

_gpulock_set() {
	if [ -n "${_gpulock_csh-}" ]; then
		_gpulock_value=${1#*=}
		case $_gpulock_value in # some csh runs what stands in backquotes in a variable
		*[!A-Za-z0-9_.,:/=@%+\ -]*) _gpulock_value= ;;
		esac
		printf '%s\n=%s\n' "${1%%=*}" "$_gpulock_value"
	else
		# shellcheck disable=SC2163 # NAME=value, as it stands in the line
		export "$1"
	fi
}

_gpulock_export() {
	while IFS= read -r _gpulock_line; do
		_gpulock_name=${_gpulock_line%%=*}
		_gpulock_name=${_gpulock_name#APPTAINERENV_}
		case ${_gpulock_name#SINGULARITYENV_} in
		CUDA_VISIBLE_DEVICES | CUDA_DEVICE_ORDER | NVIDIA_VISIBLE_DEVICES | GPULOCK_DEVICES | \
			GPU_DEVICE_ORDINAL | GPULOCK_CDI | GPULOCK_SHARE | SGE_GPU | \
			CUDA_MPS_PIPE_DIRECTORY | CUDA_MPS_ACTIVE_THREAD_PERCENTAGE | \
			CUDA_MPS_PINNED_DEVICE_MEM_LIMIT | \
			APPTAINER_BINDPATH | SINGULARITY_BINDPATH)
			_gpulock_set "$_gpulock_line"
			;;
		esac
	done
}

_gpulock_mine() { # whether one of our groups is one that execd hands out
	for _gpulock_gid in $_gpulock_groups; do
		for _gpulock_range in $_gpulock_ranges; do
			[ "$_gpulock_gid" -lt "${_gpulock_range%-*}" ] ||
				[ "$_gpulock_gid" -gt "${_gpulock_range#*-}" ] || return 0
		done
	done
	return 1
}

[ -n "${GPULOCK_DEVICES+x}" ] || _gpulock_login
unset -f _gpulock_login _gpulock_export _gpulock_mine _gpulock_set
unset _gpulock_spool _gpulock_ranges _gpulock_name _gpulock_groups _gpulock_job _gpulock_file \
	_gpulock_gid _gpulock_line _gpulock_range _gpulock_value
