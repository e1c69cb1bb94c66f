#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A hook of enroot: `enroot start` in a job gives the container the job's mask (docs/containers.md).
#
# enroot passes no variable of the job to a container, and the image's own would stand. Under pyxis
# each task has its own mask, which gpulock's SPANK plugin sets. It runs as the user, in the job.
set -euo pipefail
[ -z "${PYXIS_VERSION-}" ] || exit 0
[ -v CUDA_VISIBLE_DEVICES ] || exit 0 # no job of gpulock's
for name in CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL \
	GPULOCK_DEVICES GPULOCK_SHARE; do
	sed -i "/^${name}=/d" "${ENROOT_ENVIRON}"
	[ ! -v "${name}" ] || printf '%s=%s\n' "${name}" "${!name}" >>"${ENROOT_ENVIRON}"
done
for name in CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE \
	CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; do
	[ -v "${name}" ] || continue # the image's own stands
	sed -i "/^${name}=/d" "${ENROOT_ENVIRON}"
	printf '%s=%s\n' "${name}" "${!name}" >>"${ENROOT_ENVIRON}"
done
