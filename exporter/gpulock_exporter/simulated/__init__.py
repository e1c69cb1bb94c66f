# SPDX-License-Identifier: Apache-2.0
"""A node of `gpulock simulate` as a source of frames: what NVML would tell of it.

Only the worker process imports this package; nothing here calls NVML.
"""
