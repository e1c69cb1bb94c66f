# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: sockets, requests, responses, and the page for people.

It serves what `metrics` and `state` have made, and asks no driver.
"""
