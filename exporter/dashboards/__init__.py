# SPDX-License-Identifier: Apache-2.0
"""Grafana dashboards as code: `make dashboards` writes the JSON that is shipped beside it.

By grafana-foundation-sdk, Grafana's own, which is made anew from Grafana's schemas for every
release; grafanalib, the other one, has had no release since January 2024. Its version is that of
the oldest Grafana that is to load them: newer ones take older dashboards, not the other way round.
"""
