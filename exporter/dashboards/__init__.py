# SPDX-License-Identifier: Apache-2.0
"""Grafana dashboards as code: `make dashboards` writes the JSON that is shipped beside it."""
