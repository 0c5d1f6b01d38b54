"""The torch operators that a source file registers, read from its text.

``TORCH_LIBRARY`` and related macros, also of torch's stable ABI: ``m.def("name(schema)")``, with a
function or without, and ``m.impl("name", [key,] &function)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.compile.cpptext import arguments, bracketed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.compile.cppscan import Block, Name
    from builder.compile.cpptext import Text

#: Registration macros of either ABI, and the meaning of their arguments.
_MACRO = re.compile(r"(STABLE_)?TORCH_LIBRARY(_FRAGMENT|_IMPL)?(?:_EXPAND)?")
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"')
#: A function as an argument: ``&f``, ``&a::f``, ``TORCH_BOX(&f)``, ``TORCH_FN(f)``.
_FUNCTION = re.compile(r"(?:TORCH_BOX|TORCH_FN)?\s*\(?\s*&?\s*((?:::)?\w+(?:\s*::\s*\w+)*)\s*\)?")
_KEY = re.compile(r"(?:(?:torch|c10|at)\s*::\s*)*(?:DispatchKey\s*::\s*)?(k?)(\w+)")
#: The key of an operator whose function is registered for none (``m.impl("f", &f)``), or for
#: ``CatchAll``, as torch names it.
NO_KEY = "CompositeImplicitAutograd"
_CONCAT = re.compile(r"CONCAT\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """One operator and the function behind it for one dispatch key.

    ``function`` is empty if a release registers something other than a named function, which
    cannot be registered anew.
    """

    #: ``_C::silu_and_mul``, with its overload after a dot if any
    name: str
    key: str
    abi: str
    function: Name
    #: the namespaces around the block, where the function is looked up first
    scope: Name = ()
    #: registered by ``def``, which torch allows only once
    defines: bool = False


@dataclass(frozen=True, kw_only=True)
class Head:
    """The library and dispatch key of a block's macro; empty if its calls have them."""

    library: str
    key: str
    abi: str
    variable: str
    defines: bool


def head_of(block: Block, text: Text, extension: str) -> Head | None:
    """The head of a block in a file of an extension; None if it has another form."""
    found = _MACRO.fullmatch(block.macro)
    start, end = block.arguments
    words = [text.code[a:b].strip() for a, b in arguments(text.code, start + 1, end - 1)]
    kind = found[2] if found else None
    if found is None or len(words) != (3 if kind == "_IMPL" else 2):
        return None
    library = _CONCAT.sub(r"\1\2", words[0]).replace("TORCH_EXTENSION_NAME", extension)
    key = _key(words[1]) if kind == "_IMPL" else ""
    if not re.fullmatch(r"\w+", library) or key is None:
        return None
    return Head(
        library=library,
        key=key,
        abi="stable" if found[1] else "classic",
        variable=words[-1],
        defines=kind != "_IMPL",
    )


def calls(block: Block, text: Text, variable: str) -> Iterator[tuple[str, int, int]]:
    """``def`` and ``impl`` calls in a block: name, start, and end."""
    start, end = block.body
    for found in re.finditer(rf"\b{re.escape(variable)}\s*\.\s*(def|impl)\s*(\()", text.code[:end]):
        if found.start() > start:
            yield found[1], found.start(), bracketed(text.code, found.start(2))


def again(raw: str, blocks: Sequence[Block], text: Text, place: tuple[str, str, str]) -> str:
    """A file that registers operators, changed so that it loads beside the original extension.

    Definitions are removed and implementations are kept; torch shows a mark as their location.

    Args:
        raw: the file.
        blocks: its registration blocks.
        text: its parsed text.
        place: its path, its extension, and the mark.
    """
    path, extension, mark = place
    edits: list[tuple[int, int, str]] = []
    for block in blocks:
        head = head_of(block, text, extension)
        if head is None:
            continue
        kind, key = ("FRAGMENT", "") if head.defines else ("IMPL", f"{head.key}, ")
        macro = f"{'STABLE_' if head.abi == 'stable' else ''}TORCH_LIBRARY_{kind}"
        opened = f'\n#line 1 "{mark}"\n{macro}({head.library}, {key}{head.variable})'
        edits.append((block.start, block.arguments[1], opened))
        for call, start, end in calls(block, text, head.variable):
            if call == "def":
                edits.append((start, end, "(void)0"))
        line = raw.count("\n", 0, block.body[1]) + 1
        edits.append((block.body[1], block.body[1], f'\n#line {line} "{path}"\n'))
    for start, end, new in sorted(edits, reverse=True):
        raw = raw[:start] + new + raw[end:]
    return raw


def registered(blocks: Sequence[Block], text: Text, extension: str) -> list[Registered]:
    """All functions that a file of an extension registers, in order."""
    found = []
    for block in blocks:
        head = head_of(block, text, extension)
        if head is None:
            continue
        for kind, start, end in calls(block, text, head.variable):
            row = _row(head, kind, _arguments(text, start, end), block.scope)
            if row is not None:
                found.append(row)
    return found


def _arguments(text: Text, start: int, end: int) -> list[str]:
    """The arguments of a call; strings are not split."""
    opened = text.code.index("(", text.code.index(".", start)) + 1
    return [text.strings[a:b].strip() for a, b in arguments(text.code, opened, end - 1)]


def _row(head: Head, kind: str, words: Sequence[str], scope: Name) -> Registered | None:
    """The operator of one call; None for a definition without a function."""
    if not words or (kind == "def" and (len(words) == 1 or words[1].startswith("{"))):
        return None
    schema = "".join(_STRING.findall(words[0]))
    name = schema.partition("(")[0].strip()
    key: str | None = head.key or NO_KEY
    if kind == "impl" and len(words) == 3:
        key = _key(words[1])
    function = _FUNCTION.fullmatch(words[-1])
    plain = name and key and function and len(words) <= (3 if kind == "impl" else 2)
    return Registered(
        name=f"{head.library}::{name}",
        key=key or "",
        abi=head.abi,
        function=tuple(re.findall(r"\w+", function[1])) if plain and function else (),
        scope=scope,
        defines=kind == "def",
    )


def _key(word: str) -> str | None:
    """``CUDA`` for ``torch::kCUDA`` and ``c10::DispatchKey::CUDA``."""
    found = _KEY.fullmatch(word)
    return None if found is None else NO_KEY if found[2] == "CatchAll" else found[2]
