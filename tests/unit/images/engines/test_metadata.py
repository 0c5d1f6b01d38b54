"""The documents of an image: their bytes are part of its digest."""

from __future__ import annotations

import json
import random
from typing import Any

from builder.images.engines.metadata import indented

TEXTS = ("", "x, y: {z} [q]", 'a"b\\c/d', "\x00\n\u2028\x7f", "\u00e9\U0001f600", "sha256:0")


def some(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(7 if depth < 5 else 5)
    if kind == 5:
        return [some(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == 6:
        return {dice.choice(TEXTS): some(dice, depth + 1) for _ in range(dice.randrange(4))}
    number = dice.random() * 10.0 ** dice.randrange(-20, 20)
    return (None, dice.random() < 0.5, dice.randrange(-(10**20), 10**20), number,
            dice.choice(TEXTS))[kind]  # fmt: skip


def test_indented_documents_have_the_bytes_of_the_standard_library() -> None:
    dice = random.Random(20_261_123)
    values = [some(dice) for _ in range(500)]
    for value in (*values, {"b": 1, "a": {"z": [], "y": {}}}, {"name": "\ud800"}):
        assert indented(value) == json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
