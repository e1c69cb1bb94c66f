# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge` and `uninstall sge`: Grid Engine's configuration and hooks.

Cold. The changes are made and undone by `install.change` and `install.undo`.
"""
