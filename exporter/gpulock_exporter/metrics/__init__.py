# SPDX-License-Identifier: Apache-2.0
"""The families of metrics, made from a snapshot, and their text. Pure but for `process`.

What a value means and when it is known is decided in `state`; who may ask for it, in `web`.
"""
