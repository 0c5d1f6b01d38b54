"""The keys of ``layer.toml`` and ``pins.toml``: their types, and which are required."""

from __future__ import annotations

import datetime

from builder.applier.opkinds import Env, Graft, Pull, Remove, Wheel
from builder.applier.values import keys_of

#: key -> (type, required).  Unknown keys are errors, because a misspelt one would have no effect.
LAYER = {
    "summary": (str, True),
    "description": (str, False),
    "order": (int, True),
    "after": (list, False),
    "series": (str, False),
    "package": (str, True),
    "provenance": (dict, True),
    "upstream": (list, False),
    "not-applicable": (list, False),
    "variant": (list, True),
}
#: DEP-3 fields; https://dep-team.pages.debian.net/deps/dep3/
PROVENANCE = {
    "origin": (str, True),
    "bug": (list, False),
    "forwarded": (str, True),
    "applied-upstream": (str, True),
    "last-update": (datetime.date, True),
}
UPSTREAM = {
    "when": (dict, True),
    "since": (str, True),
    "reason": (str, True),
    "probe": (list, True),
}
NOT_APPLICABLE = {"when": (dict, True), "reason": (str, True)}
VARIANT = {
    "name": (str, True),
    "when": (dict, True),
    "notes": (list, False),
    "serve-flags": (list, False),
    "moe-serve-flags": (list, False),
    "op": (list, False),
}
COMMON = {"op": (str, True), "if": (dict, False)}
OPS: dict[str, dict[str, tuple[type, bool]]] = {
    "replace": {
        "file": (str, True),
        "old": (str, False),
        "old-file": (str, False),
        "new": (str, False),
        "new-file": (str, False),
        "count": (int, False),
    },
    "diff": {"file": (str, True)},
    "graft": keys_of(Graft),
    "copy": {"from": (str, True), "to": (str, True)},
    "wheel": {**keys_of(Wheel), "wins-over": (list, False)},
    "remove": keys_of(Remove),
    "env": keys_of(Env),
    "hook": {"file": (str, True), "hook": (str, True)},
    "compile": {
        "source": (str, True),
        "change": (str, False),
        "file": (str, False),
        "arch": (str, True),
    },
    "pull": keys_of(Pull),
}
