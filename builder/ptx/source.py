"""Parses PTX: kernels, their parameters, variables, registers, instructions and source lines.

PTX ISA, "Syntax", "State Spaces, Types, and Variables", "Instruction Operands" and, for lines of
the kernel's source, "Debugging Directives: .loc" and ".file".  Compilers write those if line info
is on (``nvcc -lineinfo``, the CuTe DSL with ``CUTE_DSL_LINEINFO=1``).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from builder.ptx.machine import PtxError

_DIRECTIVES = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|\.file\s+(?P<number>\d+)\s+"(?P<name>[^"\n]*)"'
    r"|\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)\s+\d+"
    r"(?:\s*,\s*function_name\s+[^,\n]+,\s*inlined_at\s+(?P<outer>\d+)\s+(?P<at>\d+)\s+\d+)?"
    r"|\.(?P<begins>entry|func)\b",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*\.(?:file|loc)\b[^\n]*\n", re.MULTILINE)


def without_places(text: str) -> str:
    """The PTX without line info."""
    return _DIRECTIVE.sub("", text)


@dataclass(frozen=True)
class _Place:
    """A ``.loc``: the numbers of file and line, and those of the inlining place; 0 means none."""

    file: int = 0
    line: int = 0
    outer: int = 0
    at: int = 0


class Places:
    """Source lines by lines of one PTX text."""

    def __init__(self, text: str) -> None:
        self._files: dict[int, str] = {}
        self._lines: list[int] = []
        self._places: list[_Place] = []
        line, read = 1, 0
        for found in _DIRECTIVES.finditer(text):
            line, read = line + text.count("\n", read, found.start()), found.start()
            if found["name"] is not None:
                self._files[int(found["number"])] = found["name"]
            elif found["file"] is not None:
                numbers = (int(found[name] or 0) for name in ("file", "line", "outer", "at"))
                self._begin(line, _Place(*numbers))
            elif found["begins"]:  # what the function before said does not hold here
                self._begin(line, _Place())

    def _begin(self, line: int, place: _Place) -> None:
        self._lines.append(line)
        self._places.append(place)

    def at(self, line: int) -> str:
        """``kernel.py:12`` for a line of PTX; empty without line info."""
        number = bisect_right(self._lines, line)
        place = self._places[number - 1] if number else _Place()
        source = self._named(place.file, place.line)
        outer = self._named(place.outer, place.at)
        return f"{source}, inlined at {outer}" if source and outer else source

    def _named(self, file: int, line: int) -> str:
        return f"{self._files[file]}:{line}" if line and file in self._files else ""


# ------------------------------------------------------------------------------------------ kernels


#: Bytes of the fundamental types ("Fundamental Types").
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


@dataclass(frozen=True)
class Name:
    """A register, a variable, a label, a special register, or ``_``."""

    text: str


@dataclass(frozen=True)
class Number:
    """An integer, or the bits of a floating-point number of ``width`` bits ("Constants")."""

    value: int
    width: int = 0


@dataclass(frozen=True)
class Vector:
    """``{a, b}``."""

    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """``[base+offset]``, or ``[base, {coordinates}]`` of a tensor."""

    base: Name | Number
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """``a|b``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    """``!p``."""

    name: Name


Operand = Name | Number | Vector | Address | Pair | Negated


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``target`` is a branch's destination, as an index of the code."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Name | Negated | None
    line: int
    target: int = -1

    @property
    def name(self) -> str:
        """The opcode with all its modifiers."""
        return ".".join((self.opcode, *self.modifiers))

    def has(self, *words: str) -> bool:
        """Whether all these modifiers are there."""
        return all(word in self.modifiers for word in words)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel, with its offset in the parameter space."""

    offset: int
    size: int


@dataclass(frozen=True)
class Variable:
    """A variable in shared or local memory; without a size if the launch sets it."""

    name: str
    align: int
    size: int | None


@dataclass(frozen=True)
class Kernel:
    """An entry of a module."""

    name: str
    parameters: dict[str, Parameter]
    shared: tuple[Variable, ...]
    #: per thread
    local: tuple[Variable, ...]
    #: register -> type without its dot
    registers: dict[str, str]
    code: tuple[Instruction, ...]
    #: positions of labels
    labels: frozenset[int]
    places: Places
    target: str = ""

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter space."""
        return max((p.offset + p.size for p in self.parameters.values()), default=0)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^{;]*)\{", re.DOTALL)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+(?:\.ptr[^,]*?\s)?([\w$]+)(?:\[(\d+)\])?$"
)
_VARIABLE = re.compile(
    r"(?:\.extern\s+)?\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+([\w$]+)((?:\[\d*\])*)"
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)", re.DOTALL)
_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>")
_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_ADDRESS = re.compile(
    r"\[\s*([%\w$.]+)\s*(?:([+-])\s*(-?\w+)\s*)?(?:,\s*\{(.*)\}\s*)?\]", re.DOTALL
)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_NAME = re.compile(r"[%$_A-Za-z][\w$.%]*|_")


def kernels_of(text: str) -> dict[str, Kernel]:
    """Every entry of a PTX module.

    Raises:
        PtxError: it is not PTX, or has an unknown construct.
    """
    plain = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    target = re.search(r"^\s*\.target\s+([^\s,]+)", plain, re.MULTILINE)
    if target is None:
        raise PtxError("there is no .target directive: is this PTX?")
    outer, found, at = [], {}, 0
    for entry in _ENTRY.finditer(plain):
        if entry.start() < at:
            continue
        outer.append(plain[at : entry.start()])
        at = _closing(plain, entry.end() - 1)
        found[entry[1]] = (entry, plain[entry.end() : at])
        at += 1
    shared = list(_variables("".join([*outer, plain[at:]]), "shared"))
    kernels, places = {}, Places(text)
    for name, (entry, body) in found.items():
        line = plain.count("\n", 0, entry.end()) + 1
        reader = _Body(body, line)
        kernels[name] = Kernel(
            name=name,
            parameters=_parameters(entry[2] or "", plain.count("\n", 0, entry.start()) + 1),
            shared=(*shared, *_variables(body, "shared")),
            local=tuple(_variables(body, "local")),
            registers=reader.registers,
            code=tuple(reader.resolved()),
            labels=frozenset(reader.labels.values()),
            places=places,
            target=target[1],
        )
    return kernels


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in re.finditer(r"[{}]", text[opening:]):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            return opening + place.start()
    raise PtxError("a { is never closed", text.count("\n", 0, opening) + 1)


def _parameters(text: str, line: int) -> dict[str, Parameter]:
    offset, found = 0, {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = _PARAMETER.fullmatch(part)
        if match is None:
            raise PtxError(f"an unknown form of parameter: {' '.join(part.split())}", line)
        element = int(match[2]) // 8
        align, size = int(match[1] or element), element * int(match[4] or 1)
        offset = -(-offset // align) * align
        found[match[3]] = Parameter(offset, size)
        offset += size
    return found


def _variables(text: str, space: str) -> list[Variable]:
    found = []
    for match in _VARIABLE.finditer(text):
        if match[1] != space:
            continue
        element, counts = int(match[3]) // 8, re.findall(r"\[(\d*)\]", match[5])
        size: int | None = element
        for count in counts:
            size = size * int(count) if size and count else None
        found.append(Variable(match[4], int(match[2] or element), size))
    return found


def split(text: str) -> list[str]:
    """The operands, which commas separate outside of brackets."""
    parts, depth, begun = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(text[begun:at].strip())
            begun = at + 1
    last = text[begun:].strip()
    return [*parts, last] if last else parts


@dataclass
class _Body:
    """Reads a kernel's body, with the names of inner scopes made unique."""

    text: str
    line: int
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    code: list[tuple[Instruction, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scopes: list[tuple[int, dict[str, str]]] = [(0, {})]
        self._count = 0
        self._read()

    def _read(self) -> None:
        at, end = 0, len(self.text)
        while at < end:
            char = self.text[at]
            if char in "{}" or char.isspace():
                self.line += char == "\n"
                if char == "{":
                    self._count += 1
                    self._scopes.append((self._count, {}))
                elif char == "}":
                    self._scopes.pop()
                at += 1
            elif label := _LABEL.match(self.text, at):
                self.labels[self._unique(label[1], self._scopes[-1][0])] = len(self.code)
                at = label.end()
            else:
                at = self._statement(at)

    def _statement(self, at: int) -> int:
        if re.compile(r"\.(?:loc|file)\b").match(self.text, at):
            stop = self.text.find("\n", at)
            return stop if stop >= 0 else len(self.text)
        stop = self.text.find(";", at)
        if stop < 0:
            raise PtxError(f"a statement without its ;: {self.text[at : at + 60]!r}", self.line)
        statement = " ".join(self.text[at:stop].split())
        try:
            if statement.startswith(".reg"):
                self._declare(statement)
            elif not statement.startswith("."):
                self._instruction(statement)
            elif not statement.startswith((".shared", ".local", ".pragma")):
                raise PtxError(f"an unknown directive: {statement[:80]}", self.line)
        except (ValueError, RecursionError):
            raise PtxError(f"not understood: {statement[:80]}", self.line) from None
        finally:
            self.line += self.text.count("\n", at, stop)
        return stop + 1

    def _declare(self, statement: str) -> None:
        match = _REGISTERS.fullmatch(statement)
        if match is None:
            raise PtxError(f"an unknown form of register: {statement[:80]}", self.line)
        scope, known = self._scopes[-1]
        for part in split(match[2]):
            many = _RANGE.fullmatch(part)
            names = [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [part]
            for name in names:
                known[name] = self._unique(name, scope)
                self.registers[known[name]] = match[1]

    @staticmethod
    def _unique(name: str, scope: int) -> str:
        return f"{name}@{scope}" if scope else name

    def _instruction(self, statement: str) -> None:
        guard: Name | Negated | None = None
        if found := _GUARD.match(statement):
            register = Name(self._known(found[2]))
            guard = Negated(register) if found[1] else register
            statement = statement[found.end() :]
        name, _, rest = statement.partition(" ")
        opcode, *modifiers = name.split(".")
        operands = tuple(self.operand(part) for part in split(rest))
        made = Instruction(opcode, tuple(modifiers), operands, guard, self.line)
        self.code.append((made, tuple(number for number, _ in self._scopes)))

    def _known(self, name: str) -> str:
        for _, names in reversed(self._scopes):
            if name in names:
                return names[name]
        return name

    def operand(self, text: str) -> Operand:
        """Read one operand."""
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self.operand(part) for part in split(text[1:-1])))
        if text.startswith("["):
            return self._address(text)
        if text.startswith("!"):
            return Negated(Name(self._known(text[1:].strip())))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self.operand(first.strip()), self.operand(second.strip()))
        return self._simple(text)

    def _simple(self, text: str) -> Name | Number:
        if text[:2] in ("0f", "0F", "0d", "0D") and len(text) in (10, 18):
            return Number(int.from_bytes(bytes.fromhex(text[2:])), 32 if len(text) == 10 else 64)
        if _INTEGER.fullmatch(text):
            return Number(int(text.rstrip("U"), 0))
        if _NAME.fullmatch(text):
            return Name(self._known(text))
        raise PtxError(f"an unknown form of operand: {text[:80]}", self.line)

    def _address(self, text: str) -> Address:
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise PtxError(f"an unknown form of address: {text[:80]}", self.line)
        offset = int(match[3], 0) if match[3] else 0
        coordinates = tuple(self.operand(part) for part in split(match[4] or ""))
        sign = -1 if match[2] == "-" else 1
        return Address(self._simple(match[1]), sign * offset, coordinates)

    def resolved(self) -> list[Instruction]:
        """The code, with the targets of branches resolved."""
        code = []
        for made, scopes in self.code:
            if made.opcode == "bra":
                target = made.operands[0] if made.operands else None
                named = target.text if isinstance(target, Name) else ""
                places = (self.labels.get(self._unique(named, s)) for s in reversed(scopes))
                place = next((p for p in places if p is not None), None)
                if place is None:
                    raise PtxError(f"a branch to a label that does not exist: {named}", made.line)
                made = Instruction(
                    made.opcode, made.modifiers, made.operands, made.guard, made.line, place
                )
            code.append(made)
        return code
