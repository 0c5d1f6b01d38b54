"""The seven states of a layer, and the findings of an op.  Imports no sibling."""

from __future__ import annotations

#: The seven layer states; every consumer handles each of them.
NEEDED = "needed"
APPLIED = "applied"
UPSTREAM = "upstream"
NOT_APPLICABLE = "not-applicable"
NEEDS_REBUILD = "needs-rebuild"
DRIFT = "drift"
AMBIGUOUS = "ambiguous"
STATES = (NEEDED, APPLIED, UPSTREAM, NOT_APPLICABLE, NEEDS_REBUILD, DRIFT, AMBIGUOUS)
PRE, POST, SKIP = "pre", "post", "skip"
