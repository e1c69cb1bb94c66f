# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: sockets, requests, responses, and the landing page."""
