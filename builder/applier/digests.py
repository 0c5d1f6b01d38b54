"""Digests, and the canonical JSON that they are computed from.  Imports no sibling."""

from __future__ import annotations

import hashlib
import json


def sha256_hex(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: object) -> bytes:
    """The canonical bytes of a JSON value, for digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
