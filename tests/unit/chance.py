"""How many cases a test of chance has: few in a quick run, more in the whole suite."""

from __future__ import annotations

import os

#: Cases of each kind.  ``tests/lane.py`` asks for 25.
CASES = int(os.environ.get("SPARK_BUILD_TEST_FUZZ", "8"))
#: Whether a quick run may leave out combinations of what it tests one by one.
QUICK = CASES < 25
