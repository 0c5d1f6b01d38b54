"""Parses PTX: kernels, their parameters, variables, registers, instructions and source lines.

PTX ISA, "Syntax", "State Spaces, Types, and Variables", "Instruction Operands" and, for lines of
the kernel's source, "Debugging Directives: .loc" and ".file".  Compilers write those if line info
is on (``nvcc -lineinfo``, the CuTe DSL with ``CUTE_DSL_LINEINFO=1``).
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from builder.ptx.machine import NOT_UNDERSTOOD, PtxError, not_understood

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DIRECTIVES = re.compile(
    r"//[^\n]*|/\*.*?(?:\*/|\Z)"
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
        for match in _DIRECTIVES.finditer(text):
            line, read = line + text.count("\n", read, match.start()), match.start()
            if match["name"] is not None:
                self._files[int(match["number"])] = match["name"]
            elif match["file"] is not None:
                numbers = (int(match[name] or 0) for name in ("file", "line", "outer", "at"))
                self._begin(line, _Place(*numbers))
            elif match["begins"]:  # what the function before said does not hold here
                self._begin(line, _Place())

    def _begin(self, line: int, place: _Place) -> None:
        self._lines.append(line)
        self._places.append(place)

    def at(self, line: int) -> str:
        """``kernel.py:12`` for a line of PTX; empty without line info."""
        place = self._place(line)
        source = self._named(place.file, place.line)
        outer = self._named(place.outer, place.at)
        return f"{source}, inlined at {outer}" if source and outer else source

    def written(self, line: int) -> str:
        """The same of code that was inlined: only where it is written."""
        place = self._place(line)
        return self._named(place.file, place.line)

    def _place(self, line: int) -> _Place:
        number = bisect_right(self._lines, line)
        return self._places[number - 1] if number else _Place()

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

    @property
    def names(self) -> Iterator[str]:
        """The names in its operands."""
        waiting: list[Operand] = [*self.operands]
        while waiting:
            match waiting.pop():
                case Name(text):
                    yield text
                case Vector(parts):
                    waiting += parts
                case Pair(first, second):
                    waiting += (first, second)
                case Negated(name):
                    yield name.text
                case Address(base, _, coordinates):
                    waiting += (base, *coordinates)
                case Number():
                    pass

    def has(self, *words: str) -> bool:
        """Whether all these modifiers are there."""
        return all(word in self.modifiers for word in words)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel, with its offset in the parameter space.

    ``kind``: the letter of its type; of an array or of bits it is ``b``.
    """

    offset: int
    size: int
    kind: str = "b"


@dataclass(frozen=True)
class Variable:
    """A variable; without a size if the launch sets it."""

    name: str
    align: int
    size: int | None
    #: the values of its elements: numbers, or names of variables and functions
    values: tuple[int | str, ...] = ()
    #: bytes of an element
    element: int = 1
    #: a kernel may store to it
    writable: bool = True


@dataclass(frozen=True)
class Function:
    """A function that a kernel calls: its code is behind the kernel's."""

    name: str
    #: position of its first instruction
    entry: int
    registers: tuple[str, ...]
    #: it may call itself, so that its registers are saved when it is called
    recursive: bool
    #: bytes of local memory for its frame, and the parameters of its calls
    stack: int


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
    #: the functions that it calls, themselves or through others
    functions: tuple[Function, ...] = ()
    #: bytes of local memory for the kernel's variables, and the parameters of its calls
    stack: int = 0
    #: ``.reqnctapercluster``: blocks of a cluster along each axis; whether the launch has to say
    cluster: tuple[int, int, int] | None = None
    explicit_cluster: bool = False
    #: variables of the module in constant and global memory
    data: tuple[Variable, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter space."""
        return max((p.offset + p.size for p in self.parameters.values()), default=0)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
#: An entry or a function.  What one lacks is looked for up to the next one only.
_CODE = re.compile(
    r"\.(?:(entry)\s+|func\b\s*(?:\.\w+\s+){0,8}(?:\(([^(){};]*)\)\s*)?)([\w$.]+)\s*"
    r"(?:\(([^(){};]*)\))?((?:(?!\.(?:entry|func)\b)[^{;])*)[{;]"
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(?P<kind>[a-z]+)(?P<bits>\d+)\s+(?:\.ptr[^,]*?\s)?(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?$"
)
_VARIABLE = re.compile(
    r"(?:\.extern\s+)?\.(shared|local|global|const)\s+(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+([\w$]+)((?:\[\d*\])*)(?:\s*=\s*([^;]+))?"
)
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.+)", re.DOTALL)
_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>")
_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)")
_AFTER_LABEL = re.compile(r"\s*\.(callprototype|branchtargets)\b([^;]*);")
_USED_BYTES = re.compile(r'\.pragma "used_bytes_mask (0x[0-9a-fA-F]+)"')
_BITS, _VECTOR = re.compile(r"\d+$"), re.compile(r"v\d")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_ADDRESS = re.compile(
    r"\[\s*([%\w$.]+)\s*(?:([+-])\s*(-?\w+)\s*)?(?:,\s*\{(.*)\}\s*)?\]", re.DOTALL
)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][+-]?\d+)?")
_NAME = re.compile(r"[%$_A-Za-z][\w$.%]*|_")
_WORD = re.compile(r"[%$_A-Za-z][\w$]*")
#: The register with the address of a function's frame in local memory, and its alignment.
FRAME, FRAME_ALIGN = "%frame", 16
#: The most lines of a module, which core.c's keys of races have bits for; instructions of a kernel;
#: registers of a range, and those that it uses; bytes of its parameters (PTX ISA, "Kernel Function
#: Parameters"); and what a variable is aligned to.  All but the parameters: our choice.
MOST_LINES, _MOST_CODE, _MOST_RANGE, _MOST_REGISTERS = 2**22, 2**20, 2**20, 2**18
_MOST_PARAMETERS, _MOST_ALIGN = 32764, 2**16
#: Digits of the largest number of a register.
_MOST_DIGITS = 10
#: Bits of a variable's element.
_ELEMENTS = (8, 16, 32, 64, 128)
#: Functions of the device's runtime that are part of the executor.
RUNTIME = ("vprintf", "__assertfail", "malloc", "free")


@dataclass(frozen=True)
class _Text:
    """An entry or a function of a module, not read yet."""

    name: str
    returns: str
    parameters: str
    #: performance-tuning and cluster directives
    directives: str
    body: str
    #: the lines of its name and of its body
    line: int
    first: int
    is_entry: bool

    @cached_property
    def words(self) -> set[str]:
        """All names in it."""
        return {*_WORD.findall(self.body)}


@dataclass(frozen=True)
class Module:
    """The parts of a PTX module; each kernel is read when it is asked for."""

    texts: dict[str, _Text]
    variables: dict[str, tuple[str, Variable]]
    places: Places
    target: str

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of its kernels."""
        return tuple(name for name, text in self.texts.items() if text.is_entry)

    def kernel(self, name: str) -> Kernel:
        """Read a kernel, and the functions that it calls.

        Raises:
            PtxError: it has an unknown construct.
        """
        with _understood(f"kernel {name[:60]}"):
            return _Linker(self, self.texts[name]).kernel()


@contextmanager
def _understood(what: str) -> Iterator[None]:
    """What Python raises of a form that nobody thought of is an error of the PTX."""
    try:
        yield
    except (*NOT_UNDERSTOOD, RecursionError, StopIteration) as error:
        raise not_understood(what, error) from error


def module_of(text: str) -> Module:
    """The parts of a PTX module.

    Raises:
        PtxError: it is not PTX.
    """
    if text.count("\n") >= MOST_LINES:
        raise PtxError(f"more than {MOST_LINES} lines")
    with _understood("the module"):
        return _parts_of(text)


def _parts_of(text: str) -> Module:
    plain = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    target = re.search(r"^\s*\.target\s+([^\s,]+)", plain, re.MULTILINE)
    if target is None:
        raise PtxError("there is no .target directive: is this PTX?")
    outer, texts, at, line, counted = [], {}, 0, 1, 0
    for match in _CODE.finditer(plain):
        if match.start() < at:
            continue
        outer.append(plain[at : match.start()])
        at = match.end()
        if match[0].endswith("{"):
            at = _closing(plain, match.end() - 1)
            line += plain.count("\n", counted, match.start())
            first = line + match[0].count("\n")
            body, counted = plain[match.end() : at], match.start()
            texts[match[3]] = _Text(
                match[3],
                match[2] or "",
                match[4] or "",
                match[5],
                body,
                line,
                first,
                bool(match[1]),
            )
            at += 1
    variables = {v.name: (space, v) for space, v in _variables("".join([*outer, plain[at:]]))}
    return Module(texts, variables, Places(text), target[1])


def kernels_of(text: str) -> dict[str, Kernel]:
    """Every entry of a PTX module.

    Raises:
        PtxError: it is not PTX, or has an unknown construct.
    """
    module = module_of(text)
    return {name: module.kernel(name) for name in module.entries}


class _Linker:
    """Joins a kernel and the functions that it calls into one piece of code.

    A function's parameters and variables are in its frame of local memory, at the address in
    ``FRAME``: first what it returns, then its parameters.  A caller puts them behind its own frame.
    """

    def __init__(self, module: Module, entry: _Text) -> None:
        self.module, self.entry = module, entry
        self.names = self._reached()
        self.registers: dict[str, str] = {}
        self.code: list[Instruction] = []
        self.labels: set[int] = set()
        self.local: list[Variable] = []
        self.shared = [v for _, v in module.variables.values() if _ == "shared"]

    def _reached(self) -> list[str]:
        """The names of functions and variables that the kernel uses, in the module's order."""
        module, names, new = self.module, set[str](), {self.entry.name}
        symbols = module.texts.keys() | module.variables.keys()
        while new:
            names |= new
            words: set[str] = set()
            for name in new:
                if name in module.texts:
                    words |= module.texts[name].words
                else:
                    words |= {v for v in module.variables[name][1].values if isinstance(v, str)}
            new = (words & symbols) - names
        return [name for name in (*module.texts, *module.variables) if name in names]

    def kernel(self) -> Kernel:
        """The kernel with its functions."""
        entry = self.entry
        parameters = _parameters(entry.parameters, entry.line)
        callees = [n for n in self.names if n in self.module.texts and n != entry.name]
        stack = self._add(entry, {}, "" if callees else None)
        functions = []
        for name in callees:
            text = self.module.texts[name]
            start, before = len(self.code), len(self.registers)
            formal = _laid_out(_variables_of(text.returns, text.line), 0)
            formal |= _laid_out(_variables_of(text.parameters, text.line), _end_of(formal))
            below = self._add(text, formal, name)
            registers = tuple(self.registers)[before:]
            again = name in self._below(name)
            functions.append(Function(name, start, registers, again, below))
        data = [self.module.variables[n] for n in self.names if n in self.module.variables]
        return Kernel(
            name=entry.name,
            parameters=parameters,
            shared=tuple(self.shared),
            local=tuple(self.local),
            registers=self.registers,
            code=tuple(self.code),
            labels=frozenset({*self.labels, *(one.entry for one in functions)}),
            places=self.module.places,
            target=self.module.target,
            functions=tuple(functions),
            stack=stack,
            cluster=_cluster(entry.directives),
            explicit_cluster=".explicitcluster" in entry.directives,
            data=tuple(
                replace(v, writable=space == "global")
                for space, v in data
                if space in ("global", "const")
            ),
        )

    def _below(self, name: str) -> set[str]:
        """The functions that one may call; by a pointer, all whose address is taken."""
        addressed = {
            v for n in self.names if n in self.module.variables
            for v in self.module.variables[n][1].values if isinstance(v, str)
        }  # fmt: skip
        names, new = set[str](), {name}
        while new:
            words: set[str] = set()
            for one in new & self.module.texts.keys():
                text = self.module.texts[one]
                words |= text.words | (addressed if ".callprototype" in text.body else set())
            new = (words & self.module.texts.keys()) - names
            names |= new
        return names

    def _add(self, text: _Text, formal: dict[str, Parameter], tag: str | None) -> int:
        """Append the code of the kernel, or of a function; return the bytes that it needs."""
        reader = _Body(text.body, text.first, tag or "")
        base, code = len(self.code), reader.resolved(len(self.code))
        variables = list(_variables(text.body))
        self.shared += [v for space, v in variables if space == "shared"]
        local = [v for space, v in variables if space == "local"]
        offsets = dict(formal)
        if tag:
            offsets |= _laid_out(local, _end_of(formal))
        else:
            self.local += local
        frame = _end_of(offsets if tag else _laid_out(local, 0))
        frame = -(-frame // FRAME_ALIGN) * FRAME_ALIGN
        calls = [one for one in code if one.opcode == "call"]
        for one in calls:
            names = [p.text for o in one.operands if isinstance(o, Vector) for p in o.parts
                     if isinstance(p, Name)]  # fmt: skip
            missing = [name for name in names if name not in reader.variables]
            if missing:
                raise PtxError(f"a call with {missing[0]}, which is no .param", one.line)
            offsets |= _laid_out([reader.variables[name] for name in names], frame)
        self.registers |= reader.registers
        if tag is not None:
            self.registers.setdefault(FRAME, "b64")
            code.append(Instruction("ret", (), (), None, code[-1].line if code else text.line))
            code = [_framed(one, offsets, frame, in_function=bool(tag)) for one in code]
        elif calls:  # only of the runtime
            self.registers.setdefault(FRAME, "b64")
            code = [_framed(one, offsets, frame, in_function=False) for one in code]
        self.code += code
        self.labels |= {base + place for place in reader.labels.values()}
        return max(frame, _end_of(offsets))


def _cluster(directives: str) -> tuple[int, int, int] | None:
    match = re.search(r"\.reqnctapercluster\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    if match is None:
        return None
    x, y, z = (int(size or 1) for size in match.groups())
    return x, y, z


def _laid_out(variables: Iterable[Variable], at: int) -> dict[str, Parameter]:
    """Place variables one after the other."""
    placed = {}
    for one in variables:
        at = -(-at // one.align) * one.align
        placed[one.name] = Parameter(at, one.size or 0)
        at += one.size or 0
    return placed


def _end_of(offsets: dict[str, Parameter]) -> int:
    return max((one.offset + one.size for one in offsets.values()), default=0)


def _framed(
    one: Instruction, offsets: dict[str, Parameter], frame: int, *, in_function: bool
) -> Instruction:
    """An instruction whose parameters and local variables are at offsets from the frame."""
    if one.opcode == "ret" and in_function:
        return replace(one, modifiers=("func",))
    if one.opcode == "call":
        target = next(o for o in one.operands if not isinstance(o, Vector))
        return replace(one, operands=(target, Number(frame)))
    operands, modifiers, local = list(one.operands), one.modifiers, False
    for place, operand in enumerate(operands):
        base = operand.base if isinstance(operand, Address) else operand
        if not isinstance(base, Name) or base.text not in offsets:
            continue
        at = offsets[base.text].offset
        if isinstance(operand, Address):
            operands[place] = Address(Name(FRAME), at + operand.offset)
            local = True
        elif one.opcode in ("mov", "cvta"):
            moved = Instruction("add", ("s64",), (operands[0], Name(FRAME), Number(at)),
                                one.guard, one.line)  # fmt: skip
            return moved if one.opcode == "mov" else replace(moved, opcode="@local")
    if local:
        spaces = ("param", "param::func", "param::entry")
        modifiers = tuple("local" if word in spaces else word for word in modifiers)
    return replace(one, operands=tuple(operands), modifiers=modifiers)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in re.finditer(r"[{}]", text[opening:]):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            return opening + place.start()
    raise PtxError("a { is never closed", text.count("\n", 0, opening) + 1)


def _parameters(text: str, line: int) -> dict[str, Parameter]:
    offset, parameters = 0, {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = _PARAMETER.fullmatch(part)
        if match is None:
            raise PtxError(f"an unknown form of parameter: {' '.join(part.split())}", line)
        one = _variable(match, line)
        size = one.size or 0
        offset = -(-offset // one.align) * one.align
        parameters[one.name] = Parameter(offset, size, "b" if match["count"] else match["kind"])
        offset += size
    if offset > _MOST_PARAMETERS:
        raise PtxError(f"parameters of {offset} bytes; {_MOST_PARAMETERS} are the most", line)
    return parameters


def _variable(match: re.Match[str], line: int) -> Variable:
    """A parameter."""
    element = _element(match["bits"], line)
    size = element * int(match["count"] or 1)
    return Variable(match["name"], _aligned(match[1], element, line), size)


def _element(bits: str, line: int = 0) -> int:
    """The bytes of an element."""
    if len(bits) > 3 or int(bits) not in _ELEMENTS:
        raise PtxError(f"a variable of elements of {bits[:20]} bits", line)
    return int(bits) // 8


def _aligned(words: str | None, element: int, line: int = 0) -> int:
    """What ``.align`` says: a power of two; without it, the bytes of an element."""
    if words is None:
        return element
    align = int(words) if len(words) < 9 else 0
    if align & (align - 1) or not 0 < align <= _MOST_ALIGN:
        raise PtxError(f".align {words[:20]} is not a power of two to {_MOST_ALIGN}", line)
    return align


def _variables_of(text: str, line: int) -> list[Variable]:
    """The parameters of a function."""
    variables = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = _PARAMETER.fullmatch(part)
        if match is None:
            raise PtxError(f"an unknown form of parameter: {' '.join(part.split())}", line)
        variables.append(_variable(match, line))
    return variables


def _variables(text: str) -> Iterator[tuple[str, Variable]]:
    """Variables with their state spaces."""
    for match in _VARIABLE.finditer(text):
        element, counts = _element(match[4]), re.findall(r"\[(\d*)\]", match[6])
        values = tuple(_initial(match[7] or "", match[3]))
        size: int | None = element
        for count in counts:
            size = size * int(count) if size and count else None
        if size is None and values:
            size = element * len(values)
        align = _aligned(match[2], element)
        yield match[1], Variable(match[5], align, size, values, element)


def _initial(text: str, kind: str) -> Iterator[int | str]:
    """The values of an initialiser: numbers, and names; ``generic(name)`` is the name."""
    for part in re.sub(r"[{}]", " ", text).split(","):
        word = re.sub(r"^generic\((.*)\)$", r"\1", part.strip())
        if word[:2] in ("0f", "0F", "0d", "0D") and kind == "f":
            yield int(f"0x{word[2:]}", 0)
        elif _INTEGER.fullmatch(word):
            yield int(word.rstrip("U"), 0)
        elif word:
            yield word


def _integer(text: str) -> int:
    """An integer of 64 bits, with or without a sign ("Integer Constants").

    Raises:
        ValueError: it is larger, or no number.
    """
    value = int(text, 0) if len(text) <= 70 else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError("an integer of more than 64 bits")
    return value


_SPACES, _NOT_CODE = re.compile(r"\s+"), re.compile(r"\.(?:loc|file)\b")
_BRACKET = re.compile(r"[{\[(]")


def split(text: str) -> list[str]:
    """The operands, which commas separate outside of brackets."""
    if not _BRACKET.search(text):
        words = [word.strip() for word in text.split(",")]
        return words if words[-1] else words[:-1]
    parts, depth, begun = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(text[begun:at].strip())
            begun = at + 1
    last = text[begun:].strip()
    return [*parts, last] if last else parts


def _used_parts(i: Instruction, used: int) -> list[Instruction]:
    """A load, or if it has bytes that are not used, one for each element with others.

    PTX ISA, "Pragma Strings: used_bytes_mask": compilers widen a load over bytes of others.
    """
    to, place = (*i.operands, None, None)[:2]
    size = _BITS.search(i.modifiers[-1]) if i.modifiers else None
    if used < 0 or size is None or not isinstance(to, Vector) or not isinstance(place, Address):
        return [i]
    count, words = int(size[0]) // 8, tuple(m for m in i.modifiers if not _VECTOR.fullmatch(m))
    parts = []
    for number, register in enumerate(to.parts):
        if used >> number * count & (1 << count) - 1:
            at = replace(place, offset=place.offset + number * count)
            parts.append(replace(i, modifiers=words, operands=(register, at)))
    return parts if len(parts) < len(to.parts) else [i]


@dataclass
class _Body:
    """Reads a kernel's body, with the names of inner scopes made unique."""

    text: str
    line: int
    #: makes names of functions unique
    tag: str = ""
    #: parameters of calls
    variables: dict[str, Variable] = field(default_factory=dict)
    branches: dict[str, tuple[Operand, ...]] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    code: list[tuple[Instruction, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scopes: list[tuple[int, dict[str, str]]] = [(0, {})]
        self._count = 0
        #: which bytes of the next load are used; -1 for all
        self._used = -1
        self._read()

    def _read(self) -> None:
        at, end = 0, len(self.text)
        while at < end:
            char = self.text[at]
            if char.isspace():
                stop = _SPACES.match(self.text, at).end()  # type: ignore[union-attr]
                self.line += self.text.count("\n", at, stop)
                at = stop
            elif char in "{}":
                if char == "{":
                    self._count += 1
                    self._scopes.append((self._count, {}))
                else:
                    self._scopes.pop()
                at += 1
            elif label := _LABEL.match(self.text, at):
                at, name = label.end(), self._unique(label[1], self._scopes[-1][0])
                if directive := _AFTER_LABEL.match(self.text, at):
                    targets = split(" ".join((directive[2] or "").split()))
                    self.branches[name] = tuple(map(Name, targets))
                    self.line += directive[0].count("\n")
                    at = directive.end()
                else:
                    self.labels[name] = len(self.code)
            else:
                at = self._statement(at)

    def _statement(self, at: int) -> int:
        if _NOT_CODE.match(self.text, at):
            stop = self.text.find("\n", at)
            return stop if stop >= 0 else len(self.text)
        stop = self.text.find(";", at)
        if stop < 0:
            raise PtxError(f"a statement without its ;: {self.text[at : at + 60]!r}", self.line)
        statement = " ".join(self.text[at:stop].split())
        try:
            if statement.startswith(".reg"):
                self._declare(statement)
            elif statement.startswith(".param"):
                scope, renamed = self._scopes[-1]
                for one in _variables_of(statement, self.line):
                    renamed[one.name] = self._unique(one.name, scope)
                    self.variables[renamed[one.name]] = replace(one, name=renamed[one.name])
            elif not statement.startswith("."):
                self._instruction(statement)
            elif match := _USED_BYTES.fullmatch(statement):
                self._used = int(match[1], 16)
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
        scope, renamed = self._scopes[-1]
        for part in split(match[2]):
            many = _RANGE.fullmatch(part)
            names = self._used_of(many[1], int(many[2])) if many else [part]
            for name in names:
                renamed[name] = self._unique(name, scope)
                self.registers[renamed[name]] = match[1]
            if len(self.registers) > _MOST_REGISTERS:
                raise PtxError(f"more than {_MOST_REGISTERS} registers", self.line)

    def _used_of(self, prefix: str, count: int) -> list[str]:
        """The registers of a range that the text names, in order.

        Raises:
            PtxError: the range is larger than a compiler's.
        """
        if count > _MOST_RANGE:
            raise PtxError(f"{count} registers; {_MOST_RANGE} are the most", self.line)
        return [f"{prefix}{number}" for number in self._numbers.get(prefix, ()) if number < count]

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        """The numbers of the names in the text, by what is before them."""
        numbers: dict[str, set[int]] = {}
        for word in {*_WORD.findall(self.text)}:
            for digits in range(1, min(_MOST_DIGITS, len(word) - 1) + 1):
                number = word[-digits:]  # %r12 may be 12 of %r, and 2 of %r1
                if not (number.isascii() and number.isdigit()):
                    break
                if number[0] != "0" or digits == 1:
                    numbers.setdefault(word[:-digits], set()).add(int(number))
        return {prefix: sorted(own) for prefix, own in numbers.items()}

    def _unique(self, name: str, scope: int) -> str:
        return f"{name}@{self.tag}{scope}" if scope or self.tag else name

    def _instruction(self, statement: str) -> None:
        guard: Name | Negated | None = None
        if match := _GUARD.match(statement):
            register = Name(self._renamed(match[2]))
            guard = Negated(register) if match[1] else register
            statement = statement[match.end() :]
        name, _, rest = statement.partition(" ")
        opcode, *modifiers = name.split(".")
        operands = tuple(self.operand(part) for part in split(rest))
        instruction = Instruction(opcode, tuple(modifiers), operands, guard, self.line)
        scopes = tuple(number for number, _ in self._scopes)
        self.code += [(one, scopes) for one in _used_parts(instruction, self._used)]
        if len(self.code) > _MOST_CODE:
            raise PtxError(f"more than {_MOST_CODE} instructions", self.line)
        self._used = -1

    def _renamed(self, name: str) -> str:
        for _, names in reversed(self._scopes):
            if name in names:
                return names[name]
        return name

    def operand(self, text: str) -> Operand:
        """Read one operand."""
        if (text[:1], text[-1:]) in (("{", "}"), ("(", ")")):
            return Vector(tuple(self.operand(part) for part in split(text[1:-1])))
        if text.startswith("["):
            return self._address(text)
        if text.startswith("!"):
            return Negated(Name(self._renamed(text[1:].strip())))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self.operand(first.strip()), self.operand(second.strip()))
        return self._simple(text)

    def _simple(self, text: str) -> Name | Number:
        if text[:2] in ("0f", "0F", "0d", "0D") and len(text) in (10, 18):
            return Number(int.from_bytes(bytes.fromhex(text[2:])), 32 if len(text) == 10 else 64)
        if _INTEGER.fullmatch(text):
            return Number(_integer(text.rstrip("U")))
        if _DECIMAL.fullmatch(text):  # used with another type than f32 it is unknown
            return Number(int.from_bytes(struct.pack("<f", float(text)), "little"), 32)
        if _NAME.fullmatch(text):
            return Name(self._renamed(text))
        raise PtxError(f"an unknown form of operand: {text[:80]}", self.line)

    def _address(self, text: str) -> Address:
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise PtxError(f"an unknown form of address: {text[:80]}", self.line)
        offset = _integer(match[3]) if match[3] else 0
        coordinates = tuple(self.operand(part) for part in split(match[4] or ""))
        sign = -1 if match[2] == "-" else 1
        return Address(self._simple(match[1]), sign * offset, coordinates)

    def resolved(self, base: int) -> list[Instruction]:
        """The code, with the targets of branches resolved; its first position is ``base``."""
        code = []
        for instruction, scopes in self.code:
            if instruction.opcode == "bra":
                target = instruction.operands[0] if instruction.operands else None
                instruction = replace(
                    instruction, target=base + self._label(instruction, target, scopes)
                )
            elif instruction.opcode == "brx":
                index, table = instruction.operands
                label = table.text if isinstance(table, Name) else ""
                names = (self.branches.get(self._unique(label, s)) for s in reversed(scopes))
                targets = next((one for one in names if one is not None), ())
                places = (Number(base + self._label(instruction, one, scopes)) for one in targets)
                instruction = replace(instruction, operands=(index, *places))
            code.append(instruction)
        return code

    def _label(self, branch: Instruction, target: Operand | None, scopes: tuple[int, ...]) -> int:
        label = target.text if isinstance(target, Name) else ""
        places = (self.labels.get(self._unique(label, s)) for s in reversed(scopes))
        place = next((p for p in places if p is not None), None)
        if place is None:
            raise PtxError(f"a branch to a label that does not exist: {label}", branch.line)
        return place
