# SPDX-License-Identifier: Apache-2.0
"""What puts gpulock onto a node and takes it away again; cold."""
