"""Results that are cached by what made them and from what."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from builder.applier.values import canonical_json, sha256_hex
from builder.common.document import Part, plain, read
from builder.common.files import write_atomically
from builder.common.leftovers import keep_latest
from builder.common.paths import cache_dir, package_file
from builder.common.programs import Program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

T = TypeVar("T", bound=Part)


@dataclass(frozen=True)
class Results:
    """One kind of results, in a folder of the cache."""

    folder: str
    #: our programs that produce them, or a module of ours as folder and file name
    programs: tuple[Program | tuple[str, str], ...]
    most: int
    suffix: str = ".json"

    def file(self, inputs: Sequence[object]) -> Path:
        """The path of the result for these inputs."""
        name = sha256_hex(canonical_json([*map(_text, self.programs), *inputs]))
        return cache_dir() / self.folder / f"{name}{self.suffix}"

    def get(self, inputs: Sequence[object], form: type[T]) -> T | None:
        """The cached result for the same inputs, or None."""
        file = self.file(inputs)
        try:
            result = read({**json.loads(file.read_bytes()), "kept": True}, form)
            os.utime(file)
        except (OSError, ValueError, TypeError):
            return None
        return result

    def put(self, inputs: Sequence[object], result: Part) -> None:
        """Cache a result; the oldest ones are removed."""
        file = self.file(inputs)
        write_atomically(file, json.dumps(plain(result)).encode())
        self.remove_oldest()

    def remove_oldest(self) -> None:
        """Remove all but the latest results."""
        keep_latest((cache_dir() / self.folder).glob(f"*{self.suffix}"), most=self.most)


def _text(program: Program | tuple[str, str]) -> str:
    if isinstance(program, Program):
        return program.digest
    return package_file(*program).read_text("utf-8")
