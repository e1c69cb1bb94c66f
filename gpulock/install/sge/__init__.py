# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge` and `uninstall sge`: Grid Engine's configuration and hooks.

Cold. Items (gpulock.install.items): the cluster's, written once by a manager, and each node's.
"""
