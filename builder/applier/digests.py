"""Digests, and the canonical JSON that they are computed from.  Imports no sibling."""

from __future__ import annotations

import hashlib
import json
import re

#: The type of a field that `builder.applier.values` checks with `is_sha256`; "" is "none".
Sha256 = str
_SHA256 = re.compile(r"[0-9a-f]{64}")


def sha256_hex(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: object) -> bytes:
    """The canonical bytes of a JSON value, for digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def is_sha256(value: object) -> bool:
    """Whether it is a sha256: 64 lower-case hexadecimal digits, so also safe in a path."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
