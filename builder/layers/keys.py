"""The keys of ``layer.toml`` and ``pins.toml``: their types, and which are required."""

from __future__ import annotations

import datetime

#: key -> (type, required).  Unknown keys are errors: a misspelt one would silently do nothing.
LAYER = {
    "summary": (str, True),
    "description": (str, False),
    "order": (int, True),
    "after": (list, False),
    "package": (str, True),
    "provenance": (dict, True),
    "upstream": (list, False),
    "not-applicable": (list, False),
    "variant": (list, True),
}
#: DEP-3 words; https://dep-team.pages.debian.net/deps/dep3/
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
PROBE = {
    "file": (str, True),
    "contains": (str, False),
    "lacks": (str, False),
    "missing": (bool, False),
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
    "graft": {
        "file": (str, True),
        "from": (str, True),
        "member": (str, False),
        "names": (list, False),
        "after": (str, False),
        "replace": (bool, False),
        "whole": (bool, False),
    },
    "copy": {"from": (str, True), "to": (str, True)},
    "wheel": {
        "distribution": (str, True),
        "version": (str, False),
        "version-of": (str, False),
        "wins-over": (list, False),
    },
    "remove": {"distribution": (str, True), "unless": (str, False)},
    "env": {"name": (str, True), "value": (str, True), "reader": (str, False)},
    "hook": {"file": (str, True), "hook": (str, True)},
    "compile": {"source": (str, True), "change": (str, True), "arch": (str, True)},
    "pull": {
        "pull": (str, True),
        "include": (list, False),
        "exclude": (list, False),
        "map": (dict, False),
    },
}
PINS = {
    "wheel": (list, False),
    "donor": (list, False),
    "pull": (list, False),
    "code": (list, False),
}
WHEEL_PIN = {
    "distribution": (str, True),
    "version": (str, True),
    "filename": (str, True),
    "sha256": (str, True),
    "size": (int, True),
    "platform": (str, True),
    "python": (str, True),
}
DONOR_PIN = {
    "distribution": (str, True),
    "version": (str, True),
    "filename": (str, True),
    "sha256": (str, True),
    "member": (str, True),
    "member-sha256": (str, True),
}
#: What was read of a released extension module: how SM121 runs the kernels of a `compile` op.
CODE_PIN = {
    "version": (str, True),
    "platform": (str, True),
    "module": (str, True),
    "sha256": (str, True),
    "how": (str, True),
    "arch": (str, False),
    "guard": (str, False),
}
