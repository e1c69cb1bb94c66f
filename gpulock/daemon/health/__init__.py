# SPDX-License-Identifier: Apache-2.0
"""Quarantine by policy (QUARANTINE_ON): find bad devices, take them out, bring them back.

Warm. What an administrator quarantines by hand is in `gpulock.store.quarantine` alone.
"""
