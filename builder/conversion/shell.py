"""Reads a shell script as a list of commands, without running it.

The grammar is tree-sitter's.  Variables with a literal value are expanded; a value that is known
only at run time (a command substitution, an argument) becomes :data:`UNKNOWN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tree_sitter import Node

#: Placeholder for a value known only at run time: a private-use character, which
#: shells and YAML treat as a letter.
UNKNOWN = "\ue000"
#: Nodes whose commands run conditionally, with names for messages.
_SOMETIMES = {
    "if_statement": "if",
    "case_statement": "case",
    "for_statement": "for",
    "while_statement": "while",
    "function_definition": "function",
}
_QUOTES = ('"', "'")
_ESCAPE_IN_STRING = re.compile(r'\\([$`"\\\n])')


@dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command of a script."""

    #: the command's name and arguments, unquoted
    words: tuple[str, ...]
    #: the line of each word, from 1
    lines: tuple[int, ...] = ()
    #: variables set only for this command: ``NAME=value command``
    assigned: tuple[tuple[str, str], ...] = ()
    #: of its first character, from 1
    line: int
    text: str
    #: the file behind ``<``, or ""
    stdin: str = ""
    #: the command whose output it reads
    source: Command | None = None
    #: ``if``, ``for`` and the like around it, outermost first
    inside: tuple[str, ...] = ()
    #: the current folder after ``cd``, or "" for the script's folder
    folder: str = ""
    #: variables that it exports
    exports: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The command's name without a folder."""
        return self.words[0].rpartition("/")[2] if self.words else ""


@dataclass
class _Script:
    variables: dict[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    folder: str = ""


def read_script(data: bytes) -> list[Command]:
    """The commands of a POSIX or Bash script, in order."""
    script = _Script()
    _walk(_parsed(data), script, ())
    return script.commands


def open_quotes(data: bytes) -> list[int]:
    """The lines of a script on which a quote begins that is not closed."""
    return list(_open_quotes(_parsed(data)))


def _parsed(data: bytes) -> Node:
    import tree_sitter
    import tree_sitter_bash

    language = tree_sitter.Language(tree_sitter_bash.language())
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


def _walk(node: Node, script: _Script, inside: tuple[str, ...]) -> None:
    match node.type:
        case "command" | "redirected_statement" | "declaration_command" | "test_command":
            _command(node, script, inside)
        case "pipeline":
            source = None
            for child in node.named_children:
                before = len(script.commands)
                _walk(child, script, inside)
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
            _children(node, script, (*inside, "for"))
        case _:
            around = _SOMETIMES.get(node.type)
            _children(node, script, (*inside, around) if around else inside)


def _children(node: Node, script: _Script, inside: tuple[str, ...]) -> None:
    for child in node.named_children:
        if child.type not in ("command_substitution", "string"):
            _walk(child, script, inside)


def _command(node: Node, script: _Script, inside: tuple[str, ...]) -> None:
    body, stdin = node, ""
    if node.type == "redirected_statement":
        inner = node.child_by_field_name("body")
        for redirect in node.children_by_field_name("redirect"):
            target = redirect.child_by_field_name("destination")
            if redirect.type == "file_redirect" and target and _text(redirect).lstrip()[:1] == "<":
                stdin = _value(target, script)
            elif redirect.type in ("heredoc_redirect", "herestring_redirect"):
                stdin = UNKNOWN
        if inner is None:
            return
        if inner.type not in ("command", "declaration_command"):
            _walk(inner, script, inside)
            return
        body = inner
    line, text = node.start_point[0] + 1, _text(node).strip()
    common = partial(Command, line=line, text=text, inside=inside, folder=script.folder)
    if body.type == "declaration_command":
        made = [_assign(c, script) for c in body.named_children if c.type == "variable_assignment"]
        exports = tuple(made) if _text(body).startswith("export") else ()
        word = _text(body).split()[0]
        script.commands.append(common(words=(word,), exports=exports))
        return
    if body.type == "test_command":
        script.commands.append(common(words=("test",)))
        return
    parts = [c for c in body.named_children if c.type not in ("variable_assignment", "comment")]
    words = tuple(_value(part, script) for part in parts)
    lines = tuple(part.start_point[0] + 1 for part in parts)
    own = dict(script.variables)  # what is set for one command is not set after it
    assigned = tuple(
        _assign(part, script) for part in body.named_children if part.type == "variable_assignment"
    )
    script.variables = own
    script.commands.append(common(words=words, lines=lines, assigned=assigned, stdin=stdin))
    if words[:1] == ("cd",) and len(words) > 1 and "function" not in inside:
        script.folder = words[1]


def _assign(node: Node, script: _Script) -> tuple[str, str]:
    name = node.child_by_field_name("name")
    value = node.child_by_field_name("value")
    key = _text(name) if name else ""
    script.variables[key] = _value(value, script) if value else ""
    return key, script.variables[key]


def _value(node: Node, script: _Script) -> str:  # noqa: PLR0911 - one for each kind of node
    """A word without quotes, with known variables expanded."""
    match node.type:
        case "raw_string":
            return _text(node)[1:-1]
        case "string_content":
            return _ESCAPE_IN_STRING.sub(r"\1", _text(node))
        case "word" | "number" | "variable_name" | "special_variable_name":
            return re.sub(r"\\(.)", r"\1", _text(node))
        case "string" | "concatenation" | "command_name":
            return _joined(node, script)
        case "simple_expansion":
            return script.variables.get(_text(node)[1:], UNKNOWN)
        case "expansion":
            return _expansion(node, script)
        case _:
            return UNKNOWN


def _joined(node: Node, script: _Script) -> str:
    """The joined parts of a word, including the text between them in a string."""
    if node.type != "string":
        return "".join(_value(child, script) for child in node.named_children) or _text(node)
    parts, at = [], node.start_byte + 1
    data = node.text or b""
    for child in node.named_children:
        parts.append(data[at - node.start_byte : child.start_byte - node.start_byte].decode())
        parts.append(_value(child, script))
        at = child.end_byte
    parts.append(data[at - node.start_byte : -1].decode())
    return "".join(parts)


def _expansion(node: Node, script: _Script) -> str:
    """``${NAME}`` or ``${NAME:-default}``; anything else is unknown."""
    match = re.fullmatch(r"\$\{(\w+)(?::?-(.*))?\}", _text(node), re.DOTALL)
    if not match:
        return UNKNOWN
    known = script.variables.get(match[1])
    return known if known is not None else match[2] or UNKNOWN


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")
