"""Finds the names that a C++ or CUDA file defines, declares and uses.

It reads namespaces, classes and functions, and is not a compiler: inside a function it only
collects the identifiers.  It skips code that it does not understand, and never guesses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.compile.cpptext import bracketed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.compile.cpptext import Text

_TOKEN = re.compile(r'[A-Za-z_]\w*|::|->|"[^"]*"|\.\.\.|[{}()<>\[\];=:~,&*]|\S')
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Keywords before a bracket that does not hold a function's parameters.
_ATTRIBUTES = frozenset(
    ("__launch_bounds__", "__attribute__", "__align__", "__declspec", "__maxnreg__",
     "__cluster_dims__", "alignas", "decltype", "requires", "noexcept", "asm", "explicit", "throw")
)  # fmt: skip
_CLASSES = frozenset({"class", "struct", "union", "enum"})
_NO_FUNCTION = frozenset(
    ["typedef", "using", "static_assert", "friend", "operator", "concept", "namespace", "return"]
)
#: Keywords that make a function local to its unit; device code is linked within one unit.
_OWN = frozenset(["static", "inline", "constexpr", "__forceinline__", "__inline__"])
_INSIDE = _OWN | {"const", "template", "__device__", "__constant__", "__shared__"}
#: A declaration inside a function (or a variable of a class type, which is harmless).
_LOCAL = re.compile(r"\b([A-Za-z_]\w*)(?:\s+|\s*[&*>]+\s*)([A-Za-z_]\w*)\s*\(")
_NO_TYPE = frozenset(
    ("return", "else", "throw", "new", "delete", "case", "goto", "typename", "template", "not")
)
_REGISTERS = re.compile(r"(STABLE_)?TORCH_LIBRARY(_FRAGMENT|_IMPL)?(_EXPAND)?")

#: A name with the namespaces and classes around it: ``("vllm", "silu")``.
Name = tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """A block that registers operators: its macro, and the positions of its arguments and body."""

    macro: str
    start: int
    arguments: tuple[int, int]
    body: tuple[int, int]
    #: the namespaces around it
    scope: Name


@dataclass(frozen=True)
class Facts:
    """The names in one file.

    ``defined``: functions and variables that other units can use; an instantiation of a template
    and a specialisation are such.  ``inside``: also defined, but local to this unit: inline,
    static, a template, device code, or in an unnamed namespace.  ``templates``: those of them that
    are templates, which a unit may instantiate for others.  ``declared``: declared only. ``used``:
    the words in function bodies.  ``whole``: its brackets match; where they do not, what was found
    is not all.
    """

    defined: frozenset[Name]
    inside: frozenset[Name]
    templates: frozenset[Name]
    declared: frozenset[Name]
    used: frozenset[str]
    blocks: tuple[Block, ...]
    whole: bool = True


def scan(text: Text) -> Facts:
    """Read a file."""
    reader = _Reader(text.code)
    reader.read()
    return Facts(
        defined=frozenset(reader.defined),
        inside=frozenset(reader.inside),
        templates=frozenset(reader.templates),
        declared=frozenset(reader.declared),
        used=frozenset(reader.used) | text.macros,
        blocks=tuple(reader.blocks),
        whole=text.code.count("{") == text.code.count("}"),
    )


@dataclass
class _Scope:
    """An open namespace (``extern "C"`` counts as one without a name) or class."""

    names: Name
    hidden: bool = False
    is_class: bool = False


Token = tuple[str, int]


class _Reader:
    def __init__(self, code: str) -> None:
        self._code = code
        self.defined: set[Name] = set()
        self.inside: set[Name] = set()
        self.templates: set[Name] = set()
        self.declared: set[Name] = set()
        self.used: set[str] = set()
        self.blocks: list[Block] = []
        self._scopes: list[_Scope] = []

    def read(self) -> None:
        """Read all statements, entering namespaces and classes and skipping other blocks."""
        head: list[Token] = []
        place = 0
        while found := _TOKEN.search(self._code, place):
            word, place = found[0], found.end()
            if word == ";":
                self._statement(head)
                head = []
            elif word == "}":
                head = []
                if self._scopes:
                    self._scopes.pop()
            elif word == "{":
                scope = self._opened(head)
                if scope is not None:
                    self._scopes.append(scope)
                    head = []
                    continue
                place = bracketed(self._code, found.start())
                self._body(found.start(), place)
                if self._value(head):
                    head.append(("{}", found.start()))
                    continue
                self._function(head, (found.start(), place))
                head = []
            elif word == "(":
                head.append((word, found.start()))
                place = bracketed(self._code, found.start())
                head.append((")", place - 1))
            elif word == ":" and [w for w, _ in head] in (["public"], ["private"], ["protected"]):
                head = []
            else:
                head.append((word, found.start()))

    def _body(self, start: int, end: int) -> None:
        self.used.update(_WORD.findall(self._code, start, end))
        for found in _LOCAL.finditer(self._code, start, end):
            if found[1] not in _NO_TYPE:
                self.declared.add(self._full((found[2],)))

    # -- blocks

    def _opened(self, head: Sequence[Token]) -> _Scope | None:
        """The namespace or class that a brace opens; None for a function, a value, an enum."""
        words = [word for word, _ in _without_template(head)]
        if words[:1] == ["inline"] and "namespace" in words:
            words = words[1:]
        if words[:1] == ["namespace"]:
            spaces = tuple(word for word in words[1:] if _WORD.fullmatch(word))
            return _Scope(spaces, hidden=not spaces)
        if words and words[0] == "extern" and len(words) == 2 and words[1].startswith('"'):
            return _Scope(())
        flat = [word for word, _ in _flat(head)]
        kinds = [place for place, word in enumerate(flat) if word in _CLASSES]
        if not kinds or "enum" in flat or "=" in flat:
            return None
        rest = flat[kinds[0] + 1 :]
        if "(" in _no_attributes(rest):
            return None  # a function that returns a struct
        named = [word for word in _no_attributes(rest) if word not in ("final", ")")]
        stop = named.index(":") if ":" in named else len(named)
        names = [word for word in named[:stop] if _WORD.fullmatch(word)]
        return _Scope(tuple(names[-1:]), hidden=not names, is_class=True)

    def _value(self, head: Sequence[Token]) -> bool:
        """Whether a brace starts an initializer: after ``=``, or without parameters."""
        flat = [word for word, _ in _flat(head)]
        return "=" in flat or ("(" not in flat and not _CLASSES & set(flat))

    # -- functions and variables

    def _function(self, head: Sequence[Token], body: tuple[int, int]) -> None:
        found = _called(head)
        if found is None:
            return
        name, (start, end) = found
        macro = _REGISTERS.fullmatch(name[-1])
        if macro and len(name) == 1:
            begins = head[_at(head, start) - 1][1]
            self.blocks.append(Block(name[0], begins, (start, end), body, self._full(())))
            return
        words = {word for word, _ in _flat(head)}
        own = any(scope.hidden or scope.is_class for scope in self._scopes) or bool(_OWN & words)
        own = own or ("__device__" in words and "__host__" not in words)
        template = _is_template(head) and not _is_specialised(head)
        (self.inside if own or template else self.defined).add(self._full(name))
        if template and not own:
            self.templates.add(self._full(name))

    def _statement(self, head: Sequence[Token]) -> None:
        flat = [word for word, _ in _flat(head)]
        if not flat or _NO_FUNCTION & set(flat):
            self._words_of(head)
            return
        found = _called(head) if "=" not in flat else None
        if found is None:
            self._variable(head, flat)
            return
        name, _ = found
        if _REGISTERS.fullmatch(name[-1]) or len(flat) < 2:
            return
        if _is_instantiation(head):
            self.defined.add(self._full(name))
        elif not _is_specialised(head):
            self.declared.add(self._full(name))

    def _variable(self, head: Sequence[Token], flat: Sequence[str]) -> None:
        self._words_of(head)
        stop = min((flat.index(sign) for sign in ("=", "[", "{}") if sign in flat), default=None)
        words = [word for word in flat[:stop] if _WORD.fullmatch(word)]
        if len(words) < 2 or _CLASSES & {words[0]} or any(s.is_class for s in self._scopes):
            return
        full = self._full((words[-1],))
        if words[0] == "extern":
            self.declared.add(full)
        elif any(scope.hidden for scope in self._scopes) or _INSIDE & set(words):
            self.inside.add(full)
        else:
            self.defined.add(full)

    def _words_of(self, head: Sequence[Token]) -> None:
        """Identifiers in an initializer, which may contain calls."""
        if any(word in ("=", "{}") for word, _ in head):
            start, end = head[0][1], head[-1][1]
            self.used.update(_WORD.findall(self._code, start, end))

    def _full(self, name: Name) -> Name:
        return (*(part for scope in self._scopes for part in scope.names), *name)


def _at(head: Sequence[Token], start: int) -> int:
    return next(i for i, (word, place) in enumerate(head) if word == "(" and place == start)


def _is_template(head: Sequence[Token]) -> bool:
    return bool(head) and head[0][0] == "template"


def _is_specialised(head: Sequence[Token]) -> bool:
    return [word for word, _ in head[:3]] == ["template", "<", ">"]


def _is_instantiation(head: Sequence[Token]) -> bool:
    return _is_template(head) and len(head) > 1 and head[1][0] != "<"


def _without_template(head: Sequence[Token]) -> list[Token]:
    """Remove a leading ``template <...>``."""
    rest = list(head)
    while len(rest) > 1 and rest[0][0] == "template" and rest[1][0] == "<":
        rest = rest[_angle_end(rest, 1) :]
    return rest


def _angle_end(head: Sequence[Token], start: int) -> int:
    """The position after the ``>`` that closes the ``<`` at ``start``."""
    depth, place = 0, start
    while place < len(head):
        word = head[place][0]
        if word == "(":
            place += 1
        elif word == "<":
            depth += 1
        elif word == ">":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return len(head)


def _flat(head: Sequence[Token]) -> list[Token]:
    """Remove template parameters and arguments."""
    rest, found, place = _without_template(head), [], 0
    while place < len(rest):
        if rest[place][0] == "<" and place and _WORD.fullmatch(rest[place - 1][0]):
            place = _angle_end(rest, place)
            continue
        found.append(rest[place])
        place += 1
    return found


def _no_attributes(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    place = 0
    while place < len(words):
        if words[place] in _ATTRIBUTES and words[place + 1 : place + 2] == ["("]:
            place += 3
            continue
        found.append(words[place])
        place += 1
    return found


def _called(head: Sequence[Token]) -> tuple[Name, tuple[int, int]] | None:
    """The function of a head, and the position of its parameters: its last bracket before
    attributes and before a constructor's initializers."""
    flat = _flat(head)
    words = [word for word, _ in flat]
    if "operator" in words or "~" in words:
        return None
    if ":" in words:
        flat = flat[: words.index(":")]
    best: tuple[Name, tuple[int, int]] | None = None
    for place, (word, start) in enumerate(flat):
        if word != "(" or not place or flat[place - 1][0] in _ATTRIBUTES:
            continue
        name = tuple(_qualified(flat, place - 1))
        if name:
            best = name, (start, flat[place + 1][1] + 1)
    return best


def _qualified(flat: Sequence[Token], place: int) -> Iterator[str]:
    """The qualified name ``a::b`` that ends at a position."""
    parts: list[str] = []
    while place >= 0 and _WORD.fullmatch(flat[place][0]):
        parts.append(flat[place][0])
        if place < 2 or flat[place - 1][0] != "::":
            break
        place -= 2
    return iter(reversed(parts))
