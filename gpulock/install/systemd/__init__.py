# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd` and `uninstall systemd`: both services.

Cold. What is put in place and taken away are items of `install.items`.
"""
