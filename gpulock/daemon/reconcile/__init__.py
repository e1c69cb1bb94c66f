# SPDX-License-Identifier: Apache-2.0
"""One reconcile of this node, and what follows from it at once.

Warm. What is missing of locks and records is put back, locks of dead owners are freed through
`gpulock.alloc`, and the files that others read are published. Policies that come after a reconcile
have packages of their own.
"""
