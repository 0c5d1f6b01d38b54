"""Counts in a model's configuration that no model has: what is made for each would not end.

The number of layers decides how much is made before anything is known of a model.
"""

from __future__ import annotations

import re

#: Layers, and what else a model has one after another; of known models the most are 108.
MOST = 10_000
#: Keys whose value is such a number, and those of a list with an entry for each.
_COUNTS = re.compile(r"(^|_)(layers?|blocks?|modules|stages|codebooks|depths?)$", re.ASCII)
_KINDS = re.compile(r"(^|_)types?$", re.ASCII)
#: Entries of any other list: ``ignored_layers`` may name each expert of each layer.
MOST_LISTED = 1_000_000


def too_many(configuration: object) -> str:
    """The key and value of a count that no model has; empty if there is none."""
    values = [("", configuration)]
    while values:
        key, value = values.pop()
        if isinstance(value, dict):
            values += ((str(name), inner) for name, inner in value.items())
        elif isinstance(value, list):
            most = MOST if _KINDS.search(key) else MOST_LISTED
            if len(value) > most:
                return f"{key[:80]} has {len(value)} entries, and at most {most} are read"
            values += ((key, inner) for inner in value if isinstance(inner, (dict, list)))
        elif isinstance(value, int) and value > MOST and _COUNTS.search(key):
            number = str(value) if value < 10**18 else "beyond 10**18"
            return f"{key[:80]} is {number}, and at most {MOST} are built"
    return ""
