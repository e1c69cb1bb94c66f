# SPDX-License-Identifier: Apache-2.0
"""The lock directory and what lies beside it: locks, owner records, the gate, notes and counters.

Hot. Here stands how files are written and read, each without trusting what stands in its place.
Whether a lock may go is decided in `gpulock.alloc`; what this node is, in `gpulock.node`.
"""
