# SPDX-License-Identifier: Apache-2.0
"""What puts gpulock onto a node and takes it away again, and the engine that changes and undoes.

Cold. A folder has what one scheduler, or systemd, needs. What changes nothing is in `doctor`.
"""
