# SPDX-License-Identifier: Apache-2.0
"""What every part of gpulockd uses: its loop, journal, signals, and calls that may hang.

Warm. Nothing here knows what gpulockd does in a round.
"""
