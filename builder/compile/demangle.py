"""Demangles C++ symbols with ``c++filt``."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from builder.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.compile.cppscan import Name

#: Template arguments without any inside.
_ANGLES = re.compile(r"<[^<>]*>")


def demangled(symbols: Sequence[str]) -> set[Name]:
    """Demangle symbols with ``c++filt``; returns names without arguments.

    Raises:
        EngineError: it is missing.
    """
    tool = shutil.which("c++filt")
    if tool is None:
        raise EngineError("c++filt is not installed", hint="apt-get install binutils")
    done = subprocess.run(
        [tool], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    found = set()
    for line in done.stdout.splitlines():
        plain = line
        while (inner := _ANGLES.sub("", plain)) != plain:
            plain = inner
        words = plain.partition("(")[0].split()
        if words:
            found.add(tuple(part for part in words[-1].split("::") if part))
    return found
