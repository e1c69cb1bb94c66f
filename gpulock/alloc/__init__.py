# SPDX-License-Identifier: Apache-2.0
"""Claim, release and reap: which devices a job gets, and whether a lock may go.

Hot. The one engine for "who uses this device, may this lock go". Nothing here knows a scheduler:
each passes its judge of owners in. Hooks, gpulockd and the command line are callers.
"""
