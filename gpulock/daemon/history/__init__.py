# SPDX-License-Identifier: Apache-2.0
"""The history: one JSON line for each claim that is over, none twice.

Warm. Reports and sums of it are in `gpulock.report`.
"""
