# SPDX-License-Identifier: Apache-2.0
"""What an administrator types: install, doctor, reap, quarantine, reserve, config, simulate.

Cold. The work itself is in `gpulock.install`, `gpulock.daemon` and `gpulock.simulate`.
"""
