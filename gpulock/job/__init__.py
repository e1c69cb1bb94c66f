# SPDX-License-Identifier: Apache-2.0
"""What a job gets to know about its devices: its variables, and its MPS.

Hot. What a hook does for a job stands in `gpulock.hooks` and in the scheduler's package.
"""
