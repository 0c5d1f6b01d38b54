"""``spark-build schema``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from builder.cli.documents import names, schema
from builder.common.console import print_json
from builder.common.document import Document, Text


class Names(Document, frozen=True, kw_only=True):
    """The documents that have a schema."""

    names: Annotated[tuple[Text, ...], Meta(min_length=1)]


def schema_command(name: str | None, json: bool) -> None:
    """Print one schema as JSON, or the names of all."""
    if name is None and json:
        print_json(Names(names=tuple(names())))
    elif name is None:
        print("\n".join(names()))
    else:
        print_json(schema(name))
