# SPDX-License-Identifier: Apache-2.0
"""The families of metrics, made from a snapshot by prometheus_client, and their text. Pure.

What a value means and when it is known is decided in `state`; who may ask for it, in `web`.
"""
