# SPDX-License-Identifier: Apache-2.0
"""`gpulock why`: who holds a device, the evidence, what would free it.

Cold. It judges nothing itself: the verdict is that of `alloc`.
"""
