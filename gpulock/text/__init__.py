# SPDX-License-Identifier: Apache-2.0
"""How things are laid out and said to a person: tables, words, advice.

Cold and pure. The command line, reports and the installer print with it; it imports none of them.
"""
