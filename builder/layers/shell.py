"""Reads a shell script as a list of commands, without running it.

The grammar is tree-sitter's.  Variables and arrays with a literal value are expanded, and split
into words where a shell does it; a value that is known only at run time (a command substitution,
an argument) becomes :data:`UNKNOWN`.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tree_sitter import Node


#: Placeholder for a value known only at run time: a private-use character, which
#: shells and YAML treat as a letter.
UNKNOWN = "\ue000"
#: A backslash and a line break in double quotes: nothing for a shell, but a script in these quotes
#: is read with it, for its lines.
_JOINED = "\ue001"
#: Characters that all expansions of a script may have together.  A command of Linux has at most
#: 2 MiB of words and variables (ARG_MAX of execve(2), with the default stack of 8 MiB).
_MOST = 1 << 22
#: What a value counts besides its characters: an array may have any number of empty ones.
_EACH = 16
#: Bytes of a script that are always read at once, and seconds for a larger one: people's take
#: a few milliseconds.
_SMALL, _SECONDS = 4096, 10.0
_DEEP = "its commands are nested too deeply"
_QUOTES = ('"', "'")
_ESCAPE_IN_STRING = re.compile(r'\\([$`"\\\n])')
#: ``${NAME}``, ``${NAME:-default}``; ``${NAME[0]}``, ``${NAME[@]}``, ``${NAME[@]+...}``.
_ARRAY = re.compile(r"\[[@*]\]")
_EXPANSION = re.compile(
    r"\$\{(\w+)(?:\[([@*]|\d{1,6})\])?(?:(:?-)([^$`\\]*)|:?\+\"?\$\{\1\[[@*]\]\}\"?)?\}"
)


@dataclass(frozen=True, kw_only=True)
class HereDocument:
    """A text behind ``<<``."""

    text: str
    #: of its first character, from 1
    line: int
    #: whether a shell expands variables in it
    expanded: bool
    #: the file behind ``>``, or ""
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command of a script."""

    #: the command's name and arguments, unquoted
    words: tuple[str, ...]
    #: the same, with line breaks escaped as in the file: for a word that is itself a script
    scripts: tuple[str, ...] = ()
    #: the line of each word, from 1
    lines: tuple[int, ...] = ()
    #: variables set only for this command: ``NAME=value command``
    assigned: tuple[tuple[str, str], ...] = ()
    #: of its first character, from 1
    line: int
    #: the command whose output it reads
    source: Command | None = None
    #: variables that it exports
    exports: tuple[tuple[str, str], ...] = ()
    heredocs: tuple[HereDocument, ...] = ()
    #: all variables with a known value, for a here-document that is a script
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The command's name without a folder."""
        return self.words[0].rpartition("/")[2] if self.words else ""


@dataclass
class _Script:
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, tuple[str, ...]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    #: characters that expansions may still have
    room: int = _MOST

    def take(self, value: str) -> str:
        """A variable's value, which counts.

        Raises:
            UsageError: all values together are too large.
        """
        self.room -= len(value) + _EACH
        if self.room < 0:
            raise UsageError(f"its variables expand to more than {_MOST >> 20} MiB")
        return value


def read_script(data: bytes, variables: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a POSIX or Bash script, in order; ``variables`` have a value before it.

    Raises:
        UsageError: it is nested too deeply, or its variables expand to too much.
    """
    script = _Script(dict(variables or {}))
    data = data.replace(_JOINED.encode(), "\ufffd".encode())
    try:
        _walk(_parsed(data), script)
    except RecursionError:
        raise UsageError(_DEEP) from None
    return script.commands


def open_quotes(data: bytes) -> list[int]:
    """The lines of a script on which a quote begins that is not closed.

    Raises:
        UsageError: it is nested too deeply.
    """
    try:
        return list(_open_quotes(_parsed(data)))
    except RecursionError:
        raise UsageError(_DEEP) from None


def _parsed(data: bytes) -> Node:
    """The syntax tree of a script.

    Raises:
        UsageError: the grammar takes too long: its time grows with the square of some errors.
    """
    import tree_sitter
    import tree_sitter_bash

    language = tree_sitter.Language(tree_sitter_bash.language())
    if len(data) > _SMALL:
        end = time.monotonic() + _SECONDS
        try:  # a parser can only be stopped if it asks for each part of the text
            tree_sitter.Parser(language).parse(
                lambda offset, _: data[offset : offset + _SMALL],
                progress_callback=lambda _, __: time.monotonic() > end,
            )
        except ValueError:
            raise UsageError(f"it is no script that can be read in {_SECONDS:.0f} s") from None
    return tree_sitter.Parser(language).parse(data).root_node


def _open_quotes(node: Node) -> Iterator[int]:
    """Of what does not parse, only quotes count: a shell may know more than the grammar."""
    if node.is_missing and node.type in _QUOTES:
        opened = node.parent.start_point[0] if node.parent else node.start_point[0]
        yield opened + 1
    elif node.type == "ERROR" and (at := _opened(_text(node))) is not None:
        yield node.start_point[0] + 1 + _text(node)[:at].count("\n")
    elif node.has_error:
        for child in node.children:
            yield from _open_quotes(child)


def _opened(text: str) -> int | None:
    """Where a quote begins that the text does not close."""
    opened, escaped = None, False
    for at, letter in enumerate(text):
        if escaped:
            escaped = False
        elif letter == "\\" and (opened is None or text[opened] == '"'):
            escaped = True
        elif letter in _QUOTES and (opened is None or text[opened] == letter):
            opened = at if opened is None else None
    return opened


def _walk(node: Node, script: _Script) -> None:
    match node.type:
        case "command" | "redirected_statement" | "declaration_command" | "test_command":
            _command(node, script)
        case "pipeline":
            source = None
            for child in node.named_children:
                before = len(script.commands)
                _walk(child, script)
                if len(script.commands) > before:
                    last = script.commands[-1]
                    if source is not None:
                        last = script.commands[-1] = replace(last, source=source)
                    source = last
        case "variable_assignment":
            _assign(node, script)
        case "for_statement":
            variable = node.child_by_field_name("variable")
            if variable is not None:
                script.variables[_text(variable)] = UNKNOWN
            _children(node, script)
        case _:
            _children(node, script)


def _children(node: Node, script: _Script) -> None:
    for child in node.named_children:
        if child.type not in ("command_substitution", "string"):
            _walk(child, script)


def _command(node: Node, script: _Script) -> None:
    body = node
    redirects: Sequence[Node] = ()
    if node.type == "redirected_statement":
        inner = node.child_by_field_name("body")
        if inner is None:
            return
        if inner.type not in ("command", "declaration_command"):
            _walk(inner, script)
            return
        body, redirects = inner, node.children_by_field_name("redirect")
    heredocs = tuple(_heredocs(redirects, script))
    common = partial(Command, line=node.start_point[0] + 1, heredocs=heredocs)
    if body.type == "declaration_command":
        assignments = [
            _assign(c, script) for c in body.named_children if c.type == "variable_assignment"
        ]
        exports = tuple(assignments) if _text(body).startswith("export") else ()
        word = _text(body).split()[0]
        script.commands.append(common(words=(word,), exports=exports))
        return
    if body.type == "test_command":
        script.commands.append(common(words=("test",)))
        return
    words, scripts, lines = _words(body, script)
    assigned = _assigned(body, script)
    known = dict(script.variables) if any(one.expanded for one in heredocs) else {}
    script.commands.append(
        common(words=words, scripts=scripts, lines=lines, assigned=assigned,
               variables=known)
    )  # fmt: skip
    _behind(redirects, script)


def _behind(redirects: Sequence[Node], script: _Script) -> None:
    """Walk what follows a here-document on its first line: ``cat <<EOF | command``."""
    for child in (child for one in redirects for child in one.named_children):
        if child.type in _AFTER:
            source, before = script.commands[-1], len(script.commands)
            _walk(child, script)
            if child.type == "pipeline" and len(script.commands) > before:
                script.commands[before] = replace(script.commands[before], source=source)


#: What may follow a here-document on its first line: ``cat <<EOF | command``.
_AFTER = ("pipeline", "command", "list")


def _heredocs(redirects: Sequence[Node], script: _Script) -> Iterator[HereDocument]:
    inner = [child for one in redirects for child in (one, *one.named_children)]
    written = (one for one in inner if one.type == "file_redirect" and ">" in _text(one)[:3])
    targets = [one.child_by_field_name("destination") for one in written]
    output = next((_value(target, script) for target in targets if target), "")
    for one in redirects:
        parts = {child.type: child for child in one.named_children}
        body, start = parts.get("heredoc_body"), parts.get("heredoc_start")
        if one.type != "heredoc_redirect" or body is None or start is None:
            continue
        stripped = _text(one).startswith("<<-")
        text = re.sub(r"(?m)^\t+", "", _text(body)) if stripped else _text(body)
        quoted = any(mark in _text(start) for mark in (*_QUOTES, "\\"))
        line = body.start_point[0] + 1
        yield HereDocument(text=text, line=line, expanded=not quoted, output=output)


def _words(body: Node, script: _Script) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """The words of a command, the same as scripts, and the line of each."""
    raw: list[str] = []
    lines: list[int] = []
    for part in body.named_children:
        if part.type not in ("variable_assignment", "comment"):
            raw += (fields := _fields(part, script))
            lines += [part.start_point[0] + 1] * len(fields)
    words = tuple(map(_plain, raw))
    scripts = tuple(word.replace(_JOINED, "\\\n") for word in raw)
    return words, scripts, tuple(lines)


def _plain(text: str) -> str:
    return text.replace(_JOINED, "")


def _assigned(body: Node, script: _Script) -> tuple[tuple[str, str], ...]:
    """What is set for one command, and not after it."""
    nodes = [part for part in body.named_children if part.type == "variable_assignment"]
    name_nodes = (node.child_by_field_name("name") for node in nodes)
    names = [_text(one) for one in name_nodes if one is not None]
    before = {name: script.variables.get(name) for name in names}
    assigned = tuple(_assign(node, script) for node in nodes)
    for name, value in before.items():
        if value is None:
            script.variables.pop(name, None)
        else:
            script.variables[name] = value
    return assigned


def _assign(node: Node, script: _Script) -> tuple[str, str]:
    name = node.child_by_field_name("name")
    value = node.child_by_field_name("value")
    key = _text(name) if name else ""
    added = any(child.type == "+=" for child in node.children)
    if value is not None and value.type == "array":
        items = [item for child in value.named_children for item in _fields(child, script)]
        before = script.arrays.get(key, ()) if added else ()
        for item in before:
            script.take(item)
        script.arrays[key] = (*before, *items)
        script.variables[key] = next(iter(script.arrays[key]), "")
        return key, UNKNOWN
    text = _value(value, script) if value else ""
    if added:
        text = script.take(script.variables.get(key, UNKNOWN)) + text
    script.variables[key] = text
    script.arrays.pop(key, None)
    return key, _plain(text)


class _Fields:
    """The words that one argument becomes."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open: list[str] | None = None

    def add(self, text: str) -> None:
        """Add to the word that is being made: a quoted or literal part, even an empty one."""
        if self._open is None:
            self._open = []
        self._open.append(text)

    def close(self) -> None:
        """End the word."""
        if self._open is not None:
            self._done.append("".join(self._open))
            self._open = None

    def split(self, text: str) -> None:
        """Add a value without quotes: blanks end words, and an empty one is none."""
        text = _plain(text)
        if text[:1].isspace():
            self.close()
        for number, part in enumerate(text.split()):
            if number:
                self.close()
            self.add(part)
        if text[-1:].isspace():
            self.close()

    def all(self) -> list[str]:
        """All words."""
        self.close()
        return self._done


def _fields(node: Node, script: _Script) -> list[str]:
    """The words that an argument becomes: arrays, and values without quotes, are split."""
    fields = _Fields()
    _add(node, script, fields, quoted=False)
    return fields.all()


def _add(node: Node, script: _Script, fields: _Fields, *, quoted: bool) -> None:
    kind = node.type
    if kind in ("command_name", "concatenation") and node.named_children:
        for child in node.named_children:
            _add(child, script, fields, quoted=quoted)
    elif kind == "string":
        if len(node.named_children) != 1 or not _ARRAY.search(_text(node)):
            fields.add("")  # "" is a word; "${ARRAY[@]}" may be none
        for part in _parts(node):
            if isinstance(part, str):
                fields.add(part)
            else:
                _add(part, script, fields, quoted=True)
    elif kind in ("simple_expansion", "expansion"):
        values = _expanded(node, script)
        for number, value in enumerate((values,) if isinstance(values, str) else values):
            if number:
                fields.close()
            (fields.add if quoted else fields.split)(value)
    else:
        fields.add(_value(node, script))


def _parts(node: Node) -> Iterator[str | Node]:
    """The parts of a string in double quotes, with the text between them."""
    at = 1
    data = node.text or b""
    for child in node.named_children:
        start = child.start_byte - node.start_byte
        if start > at:
            yield data[at:start].decode("utf-8", "replace")
        yield child
        at = child.end_byte - node.start_byte
    if at < len(data) - 1:
        yield data[at:-1].decode("utf-8", "replace")


def _value(node: Node, script: _Script) -> str:  # noqa: PLR0911 - one for each kind of node
    """A word without quotes, with known variables expanded, and not split."""
    match node.type:
        case "raw_string":
            return _text(node)[1:-1]
        case "string_content":
            return _ESCAPE_IN_STRING.sub(_unescaped, _text(node))
        case "word" | "number" | "variable_name" | "special_variable_name":
            return re.sub(r"\\(.)", r"\1", _text(node))
        case "string":
            parts = (p if isinstance(p, str) else _value(p, script) for p in _parts(node))
            return "".join(parts)
        case "concatenation" | "command_name":
            return "".join(_value(child, script) for child in node.named_children) or _text(node)
        case "simple_expansion" | "expansion":
            values = _expanded(node, script)
            return values if isinstance(values, str) else " ".join(values)
        case _:
            return UNKNOWN


def _unescaped(match: re.Match[str]) -> str:
    return _JOINED if match[1] == "\n" else match[1]


def _expanded(node: Node, script: _Script) -> str | tuple[str, ...]:
    """The value of ``$NAME`` or ``${NAME...}``; all elements of an array; else unknown."""
    if node.type == "simple_expansion":
        return script.take(script.variables.get(_text(node)[1:], UNKNOWN))
    match = _EXPANSION.fullmatch(_text(node))
    if not match:
        return UNKNOWN
    name, index, sign, default = match.groups()
    elements = script.arrays.get(name)
    if index is not None and elements is not None:
        if not index.isdigit():
            for element in elements:
                script.take(element)
            return elements
        at = int(index)
        return script.take(elements[at]) if at < len(elements) else ""
    known = script.variables.get(name) if index in (None, "0") else None
    if sign is not None and (known is None or (sign == ":-" and not known)):
        return default.strip("\"'") or UNKNOWN
    return UNKNOWN if known is None else script.take(known)


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")
