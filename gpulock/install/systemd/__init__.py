# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd` and `uninstall systemd`: both services.

Cold. The changes are made and undone by `install.change` and `install.undo`.
"""
