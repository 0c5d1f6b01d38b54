"""The commands of distributions that layers install: outside site-packages, where pip puts them."""

from __future__ import annotations

import re
from configparser import ConfigParser, Error
from typing import TYPE_CHECKING

from builder.applier.versions import normalize

if TYPE_CHECKING:
    from builder.model.plan import BuildPlan

#: ``NAME = MODULE:OBJECT [EXTRA]`` of the specification of entry points.
_NAME = re.compile(r"[\w.-]+")
_OBJECT = re.compile(r"(?P<module>[\w.]+)\s*:\s*(?P<object>[\w.]+)\s*(\[.*\])?")
_ENTRY_POINTS = re.compile(r"(?P<name>[^/]+)-[^-/]+\.dist-info/entry_points\.txt")
_SCRIPT = """#!{interpreter}
import sys

from {module} import {first}

sys.exit({object}())
"""


def commands(plan: BuildPlan) -> dict[str, bytes]:
    """Command -> script, of distributions that the base does not have; it keeps those it has."""
    found: dict[str, bytes] = {}
    for path, content in plan.changes.items():
        match = _ENTRY_POINTS.fullmatch(path)
        if match and content is not None and normalize(match["name"]) not in plan.base.packages:
            text = content.read().decode("utf-8", "replace")
            found |= _scripts(text, plan.base.interpreter)
    return found


def _scripts(text: str, interpreter: str) -> dict[str, bytes]:
    parser = ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    try:
        parser.read_string(text)
    except Error:  # no command is lost on anybody who could have used it
        return {}
    rows = parser.items("console_scripts") if parser.has_section("console_scripts") else []
    scripts = {}
    for name, value in rows:
        target = _OBJECT.fullmatch(value.strip())
        if target and _NAME.fullmatch(name):
            first = target["object"].partition(".")[0]
            words = {"module": target["module"], "object": target["object"], "first": first}
            scripts[name] = _SCRIPT.format(interpreter=interpreter, **words).encode()
    return scripts
