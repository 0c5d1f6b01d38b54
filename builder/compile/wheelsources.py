"""The sources of an extension wheel: the release's, without conflicting definitions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from builder.compile.bindings import again
from builder.compile.build import HOST_SUFFIXES
from builder.compile.discovery import Discovery
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.compile.changes import SourceChange
    from builder.compile.cmake import BuildRecipe, Unit
    from builder.compile.includes import Sources

#: CPython's headers: some units include them for the macro that defines an extension module.  The
#: library of an extension wheel is not a Python module.
_PYTHON = re.compile(rb"^([ \t]*#[ \t]*include[ \t]*<Python\.h>)", re.MULTILINE)


def wheel_sources(
    sources: Sources,
    recipe: BuildRecipe,
    change: SourceChange,
    units: Iterable[Unit],
    mark: str,
) -> SourceChange:
    """A change, with the edits that its units need to be loaded beside an extension.

    A unit that registers operators itself registers them for the wheel.  It defines none,
    because vLLM has already defined them.  CPython's headers are left out.

    Args:
        sources: the release's sources.
        recipe: the build recipe.
        change: the change.
        units: the units to compile.
        mark: the location of the registration that torch shows.

    Raises:
        UsageError: such a unit is not UTF-8 text.
    """
    changed = replace(sources, changed=change.texts)
    discovery = Discovery(changed, recipe, "")
    texts = dict(change.texts)
    for unit in units:
        for path in sorted(changed.closure(unit.path)):
            if _PYTHON.search(changed.texts[path]):
                texts[path] = _PYTHON.sub(rb"// \1", changed.texts[path])
        text, facts = discovery.file(unit.path, unit.extension)
        if not facts.blocks or unit.path.endswith(HOST_SUFFIXES):
            continue
        try:
            raw = texts.get(unit.path, changed.texts[unit.path]).decode("utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{unit.path} is not UTF-8 text, but it registers operators") from None
        texts[unit.path] = again(
            raw, facts.blocks, text, (unit.path, unit.extension, mark)
        ).encode()
    return replace(change, texts=texts)
