# SPDX-License-Identifier: Apache-2.0
"""ISOLATION: the kernel keeps a job from the devices it was not granted.

Hot, but loaded only where ISOLATION is not off. Which devices those are is decided in `alloc`.
"""
