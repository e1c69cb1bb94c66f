# SPDX-License-Identifier: Apache-2.0
"""gpulockd: its loop, its rounds, and the chores that follow each reconcile.

Warm. A folder has one kind of chore. What a hook needs too is in `alloc` or `store`, and what users
ask through the socket in `workstation`.
"""
