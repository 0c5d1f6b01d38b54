"""``spark-build schema``."""

from __future__ import annotations

from builder.util.console import print_json
from builder.util.schemas import names, schema


def schema_command(name: str | None, json: bool) -> None:
    """Print one schema as JSON, or the names of all."""
    if name is None and json:
        print_json({"schema": 1, "names": names()})
    elif name is None:
        print("\n".join(names()))
    else:
        print_json(schema(name))
