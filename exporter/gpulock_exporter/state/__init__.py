# SPDX-License-Identifier: Apache-2.0
"""What the exporter keeps and joins: frames and gpulock's own files in, a snapshot of the node out.

Nothing here writes a file or knows of metrics and HTTP.
"""
