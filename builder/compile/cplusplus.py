"""C++ and CUDA source, read as text: what is compiled of it, its names, its torch operators.

Comments, the contents of strings, directives, and branches that a build's definitions exclude
become blanks.  Positions do not change, so a position found here is valid in the file.  This reads
namespaces, classes and functions, and is not a compiler: inside a function it only collects the
identifiers.  It skips code that it does not understand, and never guesses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# ------------------------------------------------------ text without comments and inactive branches


#: Matches comments, raw strings, strings, and character literals (not the separators between
#: the digits of a number).
_HIDDEN = re.compile(
    r"//(?:\\\r?\n|[^\n])*"
    r"|/\*.*?(?:\*/|\Z)"
    r'|\bR"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![\w'])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)((?:\\\r?\n|[^\n])*)", re.MULTILINE)
_CONDITION_TOKEN = re.compile(r"\w+|&&|\|\||[<>=!]=|[!<>()]|\S")
_NUMBER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_HEADER = re.compile(r'"[^"\n]+"|<[^>\n]+>')

Span = tuple[int, int]


@dataclass(frozen=True)
class Macros:
    """A build's definitions: name -> value, and names that it defines for other targets."""

    values: Mapping[str, str] = field(default_factory=dict)
    #: certainly not defined: the release's build files define them only for other targets
    absent: frozenset[str] = frozenset()

    def value(self, name: str) -> int | None:
        """The value of a name in a condition; None if unknown."""
        if name in self.values:
            number = _NUMBER.fullmatch(self.values[name] or "1")
            return int(number[1], 0) if number else None
        return 0 if name in self.absent else None

    def has(self, name: str) -> bool | None:
        """Whether a name is defined; None if unknown."""
        return True if name in self.values else False if name in self.absent else None


@dataclass(frozen=True)
class CodeText:
    """One file: ``code`` is its text with blanks, ``strings`` keeps what is in strings.

    ``macros`` are the identifiers in the bodies of its macros;
    ``includes`` are its includes, with quotes or brackets.
    """

    code: str
    strings: str
    macros: frozenset[str]
    includes: tuple[str, ...]


def read(raw: str, defined: Macros) -> CodeText:
    """Blank everything that the compiler would not read.

    If a condition depends on an unknown value (a version, an architecture), every branch
    is kept.
    """
    without = _HIDDEN.sub(lambda m: _blank(m[0]), raw)
    with_strings = _HIDDEN.sub(lambda m: m[0] if m[0][0] == '"' else _blank(m[0]), raw)
    # comments in directives are already removed, and strings do not matter
    keep, macros, included = _compiled(without, defined)
    includes = (header[0] for a, b in included if (header := _HEADER.search(raw, a, b)))
    code: list[str] = []
    strings: list[str] = []
    last = 0
    for start, end in keep:
        for out, text in ((code, without), (strings, with_strings)):
            out += [_blank(text[last:start]), text[start:end]]
        last = end
    code.append(_blank(without[last:]))
    strings.append(_blank(with_strings[last:]))
    return CodeText("".join(code), "".join(strings), frozenset(macros), tuple(includes))


def _blank(text: str) -> str:
    """Blanks of the same length, with line ends and a string's quotes."""
    blanks = re.sub(r"[^\n]", " ", text)
    return f'"{blanks[1:-1]}"' if len(text) > 1 and text[0] == '"' else blanks


def _compiled(text: str, defined: Macros) -> tuple[list[Span], set[str], list[Span]]:
    """Spans between directives, identifiers in macros, spans of includes."""
    spans: list[Span] = []
    included: list[Span] = []
    macros: set[str] = set()
    #: for each open condition: whether this branch is kept, and whether an earlier one was
    #: certainly taken
    stack: list[tuple[bool | None, bool]] = []
    place = 0
    for directive in _DIRECTIVE.finditer(text):
        alive = all(state is not False for state, _ in stack)
        if alive:
            spans.append((place, directive.start()))
        place = directive.end()
        word, rest = directive[1], directive[2].replace("\\\n", " ").replace("\\\r\n", " ")
        if word in ("if", "ifdef", "ifndef"):
            stack.append(_opened(word, rest, defined))
        elif word in ("elif", "else") and stack:
            _, before = stack.pop()
            state: bool | None = False if before else True if word == "else" else None
            if word == "elif" and not before:
                state = holds(rest, defined)
            stack.append((state, before or state is True))
        elif word == "endif" and stack:
            stack.pop()
        elif word == "define" and alive:
            macros.update(_WORD.findall(rest)[1:])
        elif word == "include" and alive:
            included.append(directive.span(2))
    if all(state is not False for state, _ in stack):
        spans.append((place, len(text)))
    return spans, macros, included


def _opened(word: str, rest: str, defined: Macros) -> tuple[bool | None, bool]:
    if word == "if":
        state = holds(rest, defined)
    else:
        name = _WORD.search(rest)
        has = defined.has(name[0]) if name else None
        state = has if word == "ifdef" or has is None else not has
    return state, state is True


def holds(condition: str, defined: Macros) -> bool | None:
    """Whether the condition of an ``#if`` is true; None if unknown."""
    words = _CONDITION_TOKEN.findall(condition)
    try:
        value = _Condition(words, defined).either()
    except (IndexError, ValueError):
        return None
    return None if value is None else bool(value)


class _Condition:
    """Evaluates one condition; None means unknown."""

    def __init__(self, words: list[str], defined: Macros) -> None:
        self._words = [*words, ""]
        self._at = 0
        self._defined = defined

    def _take(self, *wanted: str) -> str:
        word = self._words[self._at]
        if wanted and word not in wanted:
            return ""
        self._at += 1
        return word

    def either(self) -> int | None:
        value = self._both()
        while self._take("||"):
            other = self._both()
            sure = bool(value) or bool(other)
            value = 1 if sure else None if None in (value, other) else 0
        return value

    def _both(self) -> int | None:
        value = self._compared()
        while self._take("&&"):
            other = self._compared()
            value = 0 if 0 in (value, other) else None if None in (value, other) else 1
        return value

    def _compared(self) -> int | None:
        value = self._single()
        sign = self._take("==", "!=", "<", ">", "<=", ">=")
        if not sign:
            if self._words[self._at] not in ("", "&&", "||", ")"):
                raise ValueError("arithmetic and the like")
            return value
        other = self._single()
        if value is None or other is None:
            return None
        compare = {"==": value == other, "!=": value != other, "<": value < other}
        compare |= {">": value > other, "<=": value <= other, ">=": value >= other}
        return int(compare[sign])

    def _single(self) -> int | None:
        if self._take("!"):
            value = self._single()
            return None if value is None else int(not value)
        if self._take("("):
            value = self.either()
            if not self._take(")"):
                raise ValueError("an open bracket")
            return value
        word = self._take()
        if word == "defined":
            bracket = self._take("(")
            has = self._defined.has(self._take())
            if bracket:
                self._take(")")
            return None if has is None else int(has)
        number = _NUMBER.fullmatch(word)
        if number:
            return int(number[1], 0)
        if not _WORD.fullmatch(word) or self._words[self._at] == "(":
            raise ValueError("a call")
        return self._defined.value(word)


def bracketed(code: str, start: int) -> int:
    """The position after the bracket that closes the one at ``start``, or the text's end."""
    depth = 0
    for bracket in re.compile(r"[()\[\]{}]").finditer(code, start):
        depth += 1 if bracket[0] in "([{" else -1
        if depth == 0:
            return bracket.end()
    return len(code)


def arguments(code: str, start: int, end: int) -> Iterator[Span]:
    """The spans between top-level commas of a bracketed text."""
    depth, last = 0, start
    for place in range(start, end):
        letter = code[place]
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            yield last, place
            last = place + 1
    if code[last:end].strip():
        yield last, end


# -------------------------------------------------------------------------------------------- names


_TOKEN = re.compile(r'[A-Za-z_]\w*|::|->|"[^"]*"|\.\.\.|[{}()<>\[\];=:~,&*]|\S')
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


def scan(text: CodeText) -> Facts:
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
        while token := _TOKEN.search(self._code, place):
            word, place = token[0], token.end()
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
                place = bracketed(self._code, token.start())
                self._body(token.start(), place)
                if self._value(head):
                    head.append(("{}", token.start()))
                    continue
                self._function(head, (token.start(), place))
                head = []
            elif word == "(":
                head.append((word, token.start()))
                place = bracketed(self._code, token.start())
                head.append((")", place - 1))
            elif word == ":" and [w for w, _ in head] in (["public"], ["private"], ["protected"]):
                head = []
            else:
                head.append((word, token.start()))

    def _body(self, start: int, end: int) -> None:
        self.used.update(_WORD.findall(self._code, start, end))
        for declaration in _LOCAL.finditer(self._code, start, end):
            if declaration[1] not in _NO_TYPE:
                self.declared.add(self._full((declaration[2],)))

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
        called = _called(head)
        if called is None:
            return
        name, (start, end) = called
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
        called = _called(head) if "=" not in flat else None
        if called is None:
            self._variable(head, flat)
            return
        name, _ = called
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
    rest, tokens, place = _without_template(head), [], 0
    while place < len(rest):
        if rest[place][0] == "<" and place and _WORD.fullmatch(rest[place - 1][0]):
            place = _angle_end(rest, place)
            continue
        tokens.append(rest[place])
        place += 1
    return tokens


def _no_attributes(words: Sequence[str]) -> list[str]:
    others: list[str] = []
    place = 0
    while place < len(words):
        if words[place] in _ATTRIBUTES and words[place + 1 : place + 2] == ["("]:
            place += 3
            continue
        others.append(words[place])
        place += 1
    return others


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


# ----------------------------------------------------------------------------- registered operators


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


def head_of(block: Block, text: CodeText, extension: str) -> Head | None:
    """The head of a block in a file of an extension; None if it has another form."""
    macro = _MACRO.fullmatch(block.macro)
    start, end = block.arguments
    words = [text.code[a:b].strip() for a, b in arguments(text.code, start + 1, end - 1)]
    kind = macro[2] if macro else None
    if macro is None or len(words) != (3 if kind == "_IMPL" else 2):
        return None
    library = _CONCAT.sub(r"\1\2", words[0]).replace("TORCH_EXTENSION_NAME", extension)
    key = _key(words[1]) if kind == "_IMPL" else ""
    if not re.fullmatch(r"\w+", library) or key is None:
        return None
    return Head(
        library=library,
        key=key,
        abi="stable" if macro[1] else "classic",
        variable=words[-1],
        defines=kind != "_IMPL",
    )


def calls(block: Block, text: CodeText, variable: str) -> Iterator[tuple[str, int, int]]:
    """``def`` and ``impl`` calls in a block: name, start, and end."""
    start, end = block.body
    for call in re.finditer(rf"\b{re.escape(variable)}\s*\.\s*(def|impl)\s*(\()", text.code[:end]):
        if call.start() > start:
            yield call[1], call.start(), bracketed(text.code, call.start(2))


def again(raw: str, blocks: Sequence[Block], text: CodeText, place: tuple[str, str, str]) -> str:
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


def registered(blocks: Sequence[Block], text: CodeText, extension: str) -> list[Registered]:
    """All functions that a file of an extension registers, in order."""
    functions = []
    for block in blocks:
        head = head_of(block, text, extension)
        if head is None:
            continue
        for kind, start, end in calls(block, text, head.variable):
            row = _row(head, kind, _arguments(text, start, end), block.scope)
            if row is not None:
                functions.append(row)
    return functions


def _arguments(text: CodeText, start: int, end: int) -> list[str]:
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
    match = _KEY.fullmatch(word)
    return None if match is None else NO_KEY if match[2] == "CatchAll" else match[2]
