# SPDX-License-Identifier: Apache-2.0
# The C half of signal, which hooks import: its Python half wraps the same names in enums (4 ms).
from signal import *
