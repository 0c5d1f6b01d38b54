"""Every JSON document that a test reads is held against its published schema."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from builder import __main__ as main
from builder.cli.documents import names, schema
from builder.cli.root import command_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jsonschema
    import pytest


def document_of(words: Sequence[str]) -> str:
    """The document that a command line prints, by the name of its schema."""
    plain = [word for word in words if not word.startswith("-")]
    known = names()
    alone = f"{plain[0]}-{getattr(command_for(plain[:1]).commands.get(plain[0]), 'default', '')}"
    candidates = ("-".join(plain[:2]), plain[0], alone if len(plain) == 1 else "")
    return next((name for name in candidates if name in known), "error")


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """The validator of a document."""
    import jsonschema

    return jsonschema.Draft202012Validator(schema(name))


def validated(name: str, document: Any) -> Any:
    """The document; an error that says where it is not as its schema has it."""
    from jsonschema.exceptions import best_match

    error = best_match(validator(name).iter_errors(document))
    assert error is None, f"{name}: {error.json_path}: {error.message}"
    return document


def verified(checks: Sequence[Any]) -> Sequence[Any]:
    """Checks as the verifier in an image makes them, held against the schema of its document."""
    digest = f"sha256:{'0' * 64}"
    document = {"schema": 1, "plan_digest": digest, "passed": False, "checks": list(checks)}
    validated("spark-verify", document)
    return checks


def make_iri_grammar_late() -> None:
    """Build the grammar of IRIs when one is checked: jsonschema's import would, and takes 2 s."""
    name = "rfc3987_syntax"

    def is_valid_syntax(*words: str) -> bool:
        if sys.modules[name] is stand_in:
            del sys.modules[name]
        return bool(importlib.import_module(name).is_valid_syntax(*words))

    stand_in = ModuleType(name)
    vars(stand_in)["is_valid_syntax"] = is_valid_syntax
    sys.modules.setdefault(name, stand_in)


def watch(patch: pytest.MonkeyPatch) -> None:
    """From now on every document that a command prints in this process is held against its schema.

    One that is not as published ends the command as a bug of ours would.
    """
    running: list[list[str]] = []
    order, show = main._common_first, main._print_document

    def ordered(words: list[str]) -> list[str]:
        running.append(order(words))
        return running[-1]

    def shown(document: dict[str, Any]) -> None:
        words = running[-1]
        published = "schema" in words[:2] and "$schema" in document
        show(document if published else validated(document_of(words), document))

    patch.setattr(main, "_common_first", ordered)
    patch.setattr(main, "_print_document", shown)
