# SPDX-License-Identifier: Apache-2.0
"""NVML: the only package that imports `pynvml`. It asks each card and fills frames.

Only the worker process imports this package: a driver that hangs must not hang the exporter.
"""
