"""The options of the levels that run on a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.files import DOCUMENT, read_regular
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


OTHER = "against.json"


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of the levels."""

    bench: bool = False
    #: evidence to compare the bench with
    against: Path | None = None
    #: a local model: a folder, or a name in the Hugging Face cache
    model: str | None = None
    serve_args: str = ""

    def check(self, levels: Sequence[str]) -> None:
        """Refuse options without effect, before anything runs.

        Raises:
            UsageError: an option belongs to a level that was not requested, or evidence is
            malformed.
        """
        given = {
            "--bench": (self.bench, ("serve",)),
            "--against": (self.against, ("serve",)),
            "--model": (self.model, ("model", "serve")),
            "--serve-args": (self.serve_args, ("serve",)),
        }
        for name, (value, needed) in given.items():
            if value and not {*needed} & {*levels}:
                words = " or ".join(needed)
                raise UsageError(
                    f"{name} is for the level {words}, which was not requested",
                    hint=f"--level {','.join([*levels, needed[0]])}",
                )
        self.evidence()

    def evidence(self) -> bytes | None:
        """The evidence to compare with.

        Raises:
            UsageError: the evidence is malformed.
        """
        if self.against is None:
            return None
        try:
            data = read_regular(self.against, DOCUMENT)
            if not isinstance(json.loads(data)["checks"], list):
                raise TypeError("'checks' is not a list")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise UsageError(
                f"--against {self.against} is not evidence of a verification: {error}",
                hint="spark-build verify OTHER --level serve --bench --json > FILE",
            ) from None
        return data

    def arguments(self, folder: str, level: str) -> list[str]:
        """The in-image verifier's command line."""
        words = ["--level", level, "--json"]
        if self.bench or self.against:
            words.append("--bench")
        if self.against:
            words += ["--against", f"{folder}/{OTHER}"]
        if self.model:
            words += ["--model", self.model]
        if self.serve_args:
            words += [f"--serve-args={self.serve_args}"]
        return words
