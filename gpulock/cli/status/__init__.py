# SPDX-License-Identifier: Apache-2.0
"""`gpulock status` and `why`: who holds which device and what it does, here or on all nodes.

Cold. It judges nothing itself: the verdict is that of `alloc`.
"""
