# SPDX-License-Identifier: Apache-2.0
"""What every part of gpulockd uses: loop, journal, signals, calls that may hang, the sample.

Warm. Nothing here knows what gpulockd does in a round.
"""
