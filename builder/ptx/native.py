"""The hot part of the executor in C: common instructions, runs of basic blocks, races they pass.

``core.c`` is compiled once by the C compiler of the machine and cached.  It declines what is rare,
before it has changed anything; then the functions of ``program`` run the instruction.  Without a
compiler they run everything: the results are the same, and it takes longer.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.common.cache import locked
from builder.common.paths import cache_dir
from builder.errors import UsageError
from builder.ptx.accesses import NARROW, space_of, stored, strength
from builder.ptx.decoder import PRED, U16, U32, U64
from builder.ptx.machine import LOCAL_WINDOW, SHARED_WINDOW, PtxError
from builder.ptx.races import Events, VectorClocks
from builder.ptx.registers import typed
from builder.ptx.source import Address, Name, Negated, Number, Pair, Vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from builder.ptx.block import Block, LaunchState, Warp
    from builder.ptx.decoder import Decoder
    from builder.ptx.memory import Region
    from builder.ptx.races import Races, Shadow, Table
    from builder.ptx.source import Instruction, Operand

# ------------------------------------------------------------------------- elementwise instructions

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _integers() -> Iterator[tuple[str, str, str]]:
    """Forms with the C types of the result and the operands, and the value of a, b and c."""
    for bits in (16, 32, 64):
        for t in (f"u{bits}", f"s{bits}"):
            yield from _arithmetic(t, f"u{bits}", "(u32)a * b" if bits == 16 else "a * b")
        yield from _logic(bits, f"u{bits}", f"s{bits}")
        for t in "busf" if bits > 16 else "bus":
            yield f"mov.{t}{bits}", f"u{bits} u{bits}", "a"
            yield f"selp.{t}{bits}", f"u{bits} u{bits} u{bits} u8", "c ? a : b"
    yield from _products()
    for name, sign in _LOGIC.items():
        yield f"{name}.pred", "u8 u8 u8", f"a {sign} b"
    yield "not.pred", "u8 u8", "!a"
    yield "mov.pred", "u8 u8", "a"
    for t in ("global", "shared", "local", "param", "const"):
        yield f"cvta.{t}.u64", "u64 u64", "a + o->immediate"
        yield f"cvta.to.{t}.u64", "u64 u64", "a + o->immediate"


_LOGIC = {"and": "&", "or": "|", "xor": "^"}


def _arithmetic(t: str, u: str, product: str) -> Iterator[tuple[str, str, str]]:
    yield f"add.{t}", f"{u} {u} {u}", "a + b"
    yield f"sub.{t}", f"{u} {u} {u}", "a - b"
    yield f"mul.lo.{t}", f"{u} {u} {u}", product
    yield f"mad.lo.{t}", f"{u} {u} {u} {u}", f"{product} + c"
    yield f"min.{t}", f"{t} {t} {t}", "a < b ? a : b"
    yield f"max.{t}", f"{t} {t} {t}", "a > b ? a : b"
    for name, sign in {**_COMPARISONS, **_UNSIGNED}.items():
        yield f"setp.{name}.{t}", f"u8 {t} {t}", f"a {sign} b"


def _logic(bits: int, u: str, s: str) -> Iterator[tuple[str, str, str]]:
    for name in ("eq", "ne"):
        yield f"setp.{name}.b{bits}", f"u8 {u} {u}", f"a {_COMPARISONS[name]} b"
    for name, sign in _LOGIC.items():
        yield f"{name}.b{bits}", f"{u} {u} {u}", f"a {sign} b"
    yield f"not.b{bits}", f"{u} {u}", "~a"
    yield f"neg.{s}", f"{u} {u}", "0 - a"
    yield f"abs.{s}", f"{u} {u}", f"({s})a < 0 ? 0 - a : a"
    yield f"shl.b{bits}", f"{u} {u} u32", f"b < {bits} ? a << (b & {bits - 1}) : 0"
    for t in (u, f"b{bits}"):
        yield f"shr.{t}", f"{u} {u} u32", f"b < {bits} ? a >> (b & {bits - 1}) : 0"
    yield f"shr.{s}", f"{s} {s} u32", f"a >> (b < {bits} ? b : {bits - 1})"


def _products() -> Iterator[tuple[str, str, str]]:
    for t, wide in (("u32", "u64"), ("s32", "s64"), ("u64", "unsigned __int128"),
                    ("s64", "__int128")):  # fmt: skip
        yield f"mul.hi.{t}", f"{t} {t} {t}", f"({wide})a * b >> {t[1:]}"
        # the least number divided by -1 would be a trap
        minus = f"b == -1 ? ({t})(0 - (u{t[1:]})a) : " if t[0] == "s" else ""
        yield f"div.{t}", f"{t} {t} {t}", f"b == 0 ? ({t})-1 : {minus}a / b"
        rest = "b == -1 ? 0 : " if t[0] == "s" else ""
        yield f"rem.{t}", f"{t} {t} {t}", f"b == 0 ? ({t})-1 : {rest}a % b"
    for t, wide in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        yield f"mul.wide.{t}", f"{wide} {t} {t}", f"({wide})a * b"
        yield f"mad.wide.{t}", f"u{wide[1:]} {t} {t} u{wide[1:]}", f"({wide})a * b + c"


def _conversions() -> Iterator[tuple[str, str, str]]:
    """The width of the destination's register, which may be wider, is a part of the form."""
    sizes = [f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "us"]
    for to in sizes:
        for source in sizes:
            register = f"u{max(16, int(source[1:]))}"
            for width in (16, 32, 64):
                if width >= int(to[1:]):
                    value = f"({to[0]}{width})({to})({source})a"
                    yield f"cvt.{to}.{source}>{width}", f"u{width} {register}", value
    for source in sizes:
        register = f"{source[0]}{max(16, int(source[1:]))}"
        yield f"cvt.rn.f32.{source}>32", f"f32 {register}", f"(f32)({source})a"
    for mode, function in (
        ("rni", "rint"),
        ("rzi", "trunc"),
        ("rmi", "floor"),
        ("rpi", "ceil"),
    ):
        for to, low, high in (
            ("s32", "-0x1p31", "0x7FFFFFFF"),
            ("u32", "0", "0xFFFFFFFF"),
        ):
            for ftz in ("", "ftz."):
                x = f"{function}((f64){'flush(a)' if ftz else 'a'})"
                inside = f"{x} >= {high} ? ({to}){high} : ({to}){x}"
                value = f"a != a ? 0 : {x} <= {low} ? ({to}){low} : {inside}"
                yield f"cvt.{mode}.{ftz}{to}.f32>32", f"{to} f32", value
    yield "cvt.f32.f16>32", "f32 u16", "from_f16(a)"
    yield "cvt.f32.bf16>32", "u32 u16", "(u32)a << 16"
    yield "cvt.rn.f16.f32>16", "u16 f32", "to_f16(a)"
    yield "cvt.rn.bf16.f32>16", "u16 f32", "to_bf16(a)"
    yield "cvt.sat.f32.f32>32", "f32 f32", "a > 0 ? a < 1 ? a : 1 : 0"
    yield "cvt.rn.f16x2.f32>32", "u32 f32 f32", "(u32)to_f16(a) << 16 | to_f16(b)"
    yield "cvt.rn.bf16x2.f32>32", "u32 f32 f32", "(u32)to_bf16(a) << 16 | to_bf16(b)"
    yield ("cvt.rn.satfinite.bf16x2.f32>32", "u32 f32 f32",
           "(u32)to_bf16(finite_bf16(a)) << 16 | to_bf16(finite_bf16(b))")  # fmt: skip
    yield (
        "cvt.rn.satfinite.e2m1x2.f32>16",
        "u16 f32 f32",
        "to_e2m1(a) << 4 | to_e2m1(b)",
    )
    yield (
        "cvt.rn.satfinite.e4m3x2.f32>16",
        "u16 f32 f32",
        "to_e4m3(a) << 8 | to_e4m3(b)",
    )
    yield (
        "cvt.rn.f16x2.e4m3x2>32",
        "u32 u16",
        "half_of_e4m3(a & 255) | (u32)half_of_e4m3(a >> 8) << 16",
    )
    yield (
        "cvt.rn.f16x2.e2m1x2>32",
        "u32 u16",
        "half_of_e2m1(a & 15) | (u32)half_of_e2m1(a >> 4 & 15) << 16",
    )


def _floats() -> Iterator[tuple[str, str, str]]:
    yield from _singles("", "a", "b", lambda value, _exact: f"one_nan({value})")
    yield from _singles(
        "ftz.",
        "flush(a)",
        "flush(b)",
        lambda value, exact: f"one_nan(flushed({value}, {exact}))",
    )
    yield "fma.rn.f32", "f32 f32 f32 f32", "one_nan(fmaf(a, b, c))"
    one, two = (f"one_nan(fmaf({p}(a), {p}(b), {p}(c)))" for p in ("low", "high"))
    yield "fma.rn.f32x2", "u64 u64 u64 u64", f"both({one}, {two})"
    for name, sign in _SUMS.items():
        one, two = (f"one_nan({part}(a) {sign} {part}(b))" for part in ("low", "high"))
        for rn in ("", "rn."):
            yield f"{name}.{rn}f32x2", "u64 u64 u64", f"both({one}, {two})"
            yield from _halves(f"{name}.{rn}", sign)
    for name, sign in _COMPARISONS.items():
        x, y = "from_bf16(a)", "from_bf16(b)"
        plain = f"{x} {sign} {y}" if name != "ne" else f"{x} < {y} || {x} > {y}"
        yield f"setp.{name}.bf16", "u8 u16 u16", plain


_SUMS = {"add": "+", "sub": "-", "mul": "*"}


def _singles(
    ftz: str, a: str, b: str, result: Callable[[str, str], str]
) -> Iterator[tuple[str, str, str]]:
    for name, sign in _SUMS.items():
        for rn in ("", "rn."):
            value = result(f"{a} {sign} {b}", f"(f64){a} {sign} {b}")
            yield f"{name}.{rn}{ftz}f32", "f32 f32 f32", value
    for name, function in (("min", "lesser"), ("max", "greater")):
        yield f"{name}.{ftz}f32", "f32 f32 f32", f"{function}({a}, {b})"
    yield f"abs.{ftz}f32", "f32 f32", f"one_nan(fabsf({a}))"
    yield f"neg.{ftz}f32", "f32 f32", f"one_nan(-{a})"
    for mode in ("rn", "approx"):
        exact = f"1.0 / (f64){a}"
        yield f"rcp.{mode}.{ftz}f32", "f32 f32", result(f"(f32)({exact})", exact)
        exact = f"sqrt((f64){a})"
        yield f"sqrt.{mode}.{ftz}f32", "f32 f32", result(f"(f32){exact}", exact)
    exact = f"(f64){a} / {b}"
    yield f"div.rn.{ftz}f32", "f32 f32 f32", result(f"(f32)({exact})", exact)
    for name, sign in _COMPARISONS.items():
        plain = f"{a} {sign} {b}" if name != "ne" else f"{a} < {b} || {a} > {b}"
        yield f"setp.{name}.{ftz}f32", "u8 f32 f32", plain
        yield (
            f"setp.{name}u.{ftz}f32",
            "u8 f32 f32",
            f"({a} {sign} {b}) || a != a || b != b",
        )


def _halves(name: str, sign: str) -> Iterator[tuple[str, str, str]]:
    """Sums and products, which float32 holds exactly enough to round them once."""
    for t in ("f16", "bf16"):
        yield f"{name}{t}", "u16 u16 u16", f"to_{t}(from_{t}(a) {sign} from_{t}(b))"
        low, high = (
            f"to_{t}(from_{t}((u16){x}) {sign} from_{t}((u16){y}))"
            for x, y in (("(a)", "(b)"), ("(a >> 16)", "(b >> 16)"))
        )
        yield f"{name}{t}x2", "u32 u32 u32", f"{low} | (u32){high} << 16"


#: By form: the types of the result and the operands, and the value.
_FORMS = {
    form: (signature.split(), value)
    for forms in (_integers, _conversions, _floats)
    for form, signature, value in forms()
}


@cache
def _codes() -> dict[tuple[str, ...], str]:
    """A name for each value, by its types and itself: forms that do the same share it."""
    distinct = dict.fromkeys((*signature, value) for signature, value in _FORMS.values())
    return {one: f"E{number}" for number, one in enumerate(distinct)}


def _table() -> str:
    """The C text of the elementwise instructions."""
    lines = []
    for (to, *sources, value), name in _codes().items():
        types = [*sources, *["u8"] * (3 - len(sources))]
        lines.append(f"CODE({name}, {to}, {', '.join(types)}, {value})\n")
    return "".join(lines)


_C = Path(__file__).with_name("core.c")
#: The codes of the others, as core.c has them.
_OTHERS = re.search(r"#undef CODE\s+(LD,[^}]*)\}", _C.read_text("utf-8"))
assert _OTHERS is not None
_CODE = {
    name: 1 + number
    for number, name in enumerate([*_codes().values(), *re.findall(r"\w+", _OTHERS[1])])
}

#: Why a run stopped, as in core.c.
LIMIT, DECLINED, NO_BLOCK, CHOOSE = range(4)

# ------------------------------------------------------------------------------------ the library

_FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)


@cache
def core() -> Any:
    """The compiled core, or None without a C compiler; compiled by the first call."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    text, table = _C.read_bytes(), _table()
    key = hashlib.sha256(
        b"\0".join(
            (
                text,
                table.encode(),
                " ".join(_FLAGS).encode(),
                platform.machine().encode(),
                str(compiler and Path(compiler).resolve()).encode(),
            )
        )
    ).hexdigest()
    path = cache_dir() / "objects" / f"ptx-{key[:32]}.so"
    if not path.exists() and (compiler is None or not _compile(compiler, table, path)):
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    library.run.argtypes = (ctypes.c_void_p,)
    library.check.argtypes, library.check.restype = (ctypes.c_void_p,), ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.unknown.argtypes = (pointer, number, pointer, pointer)
    small = ctypes.c_int
    library.watch_copy.argtypes = (
        pointer, pointer, small, pointer, number, ctypes.c_int32, pointer, pointer
    )  # fmt: skip
    library.report.argtypes = (pointer, *(number,) * 3, *(small,) * 4)
    library.watch.argtypes = (
        pointer, pointer, small, ctypes.c_int32, small, number, pointer, pointer, number, pointer
    )  # fmt: skip
    return library


def _compile(compiler: str, table: str, path: Path) -> bool:
    """Compile the core into the cache; return whether it is there."""
    try:
        with locked("the core of the PTX executor"):
            if not path.exists():
                _build(compiler, table, path)
            return path.exists()
    except (OSError, UsageError):  # a cache that cannot be written
        return False


def _build(compiler: str, table: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".ptx-") as folder:
        work = Path(folder)
        (work / "core.h").write_text(table, "utf-8")
        out = work / path.name
        command = [compiler, *_FLAGS, f"-I{work}", str(_C), "-o", str(out), "-lm"]
        done = subprocess.run(command, capture_output=True, check=False)
        if not done.returncode:
            out.replace(path)


# ---------------------------------------------------------------------- structures, as in core.c

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_FIELDS = (
    "code",
    "guard",
    "negated",
    "out",
    "a",
    "b",
    "c",
    "d",
    "bytes",
    "count",
    "extend",
    "line",
)
_OP = np.dtype([*((name, "i4") for name in _FIELDS), ("immediate", "i8")])


class _Shadow(ctypes.Structure):
    _fields_ = [("writes", _PTR), ("reads", _PTR), ("atomics", _PTR), ("copies", _PTR),
                ("size", _I64), ("shift", _I32), ("warps", _I32)]  # fmt: skip


class _Region(ctypes.Structure):
    _fields_ = [("address", _I64), ("size", _I64), ("data", _PTR), ("writable", _I64),
                ("shadow", _PTR)]  # fmt: skip


class _Events(ctypes.Structure):
    _fields_ = [
        *((name, _PTR) for name in Events.KINDS),
        ("count", _I64),
        ("room", _I64),
    ]


class _Clocks(ctypes.Structure):
    _fields_ = [("by_block", _PTR), ("lengths", _PTR), ("blocks", _I64), ("one", _PTR),
                ("length", _I64)]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [("ops", _PTR), ("lists", _PTR), ("ends", _PTR), ("gathers", _PTR),
                ("executions", _PTR), ("regions", _PTR), ("region_count", _I64), ("events", _PTR),
                ("reported", _PTR), ("reported_room", _I64), ("parameters", _PTR),
                ("parameter_bytes", _I64), ("stores", _I64), ("op_count", _I64),
                ("list_count", _I64), ("rows", _I64 * 4)]  # fmt: skip


class _Block(ctypes.Structure):
    _fields_ = [("launch", _PTR), ("shared", _PTR), ("shared_bytes", _I64), ("shadow", _PTR),
                ("times", _PTR), ("number", _I32), ("agents", _I32)]  # fmt: skip


class _Warp(ctypes.Structure):
    _fields_ = [("block", _PTR), ("pred", _PTR), ("half", _PTR), ("word", _PTR), ("wide", _PTR),
                ("local", _PTR), ("local_bytes", _I64), ("rows", _PTR), ("seen", _PTR * 32),
                ("length", _I32 * 32), ("number", _I32), ("knows", _I32), ("pc", _I64),
                ("at", _I64), ("limit", _I64), ("last", _I64), ("bound", _I64),
                ("others", _PTR), ("lengths", _PTR), ("blocks", _I64), ("parts", _I32),
                ("apart", _I32), ("changed", _I32), ("waited", _I32), ("spins", _PTR),
                ("places", _I64 * 32),
                ("mask", ctypes.c_uint8 * 32), ("stopped", ctypes.c_uint8 * 32)]  # fmt: skip


# ----------------------------------------------------------------------- instructions of core.c


#: Room for the pairs of lines of twice as many races as any kernel here has; a power of two.
_KNOWN_RACES = 4096
_SPACE = {"global": 0, "shared": 1, "cluster": 1, "local": 2, "generic": 4}
_WIDTH = {U16: 16, U32: 32, U64: 64}
#: Offsets of parameters are less.
_FARTHEST = 2**31
_SHUFFLES, _VOTES = ("idx", "up", "down", "bfly"), ("all", "any", "uni", "ballot")
_WINDOW = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
_WORD, _FLAG = typed("b32"), typed("pred")


class Translator:
    """Describes the instructions of a kernel for core.c, which leaves some to Python."""

    def __init__(self, decoder: Decoder) -> None:
        self.d = decoder
        self.ops: list[tuple[int, ...]] = []
        self.lists: list[int] = [0]

    def add(self, i: Instruction) -> None:
        """Describe an instruction that has been decoded."""
        try:
            fields = self._form(i)
        except (PtxError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError):
            fields = None
        values = dict(guard=-1, negated=0, line=i.line, **(fields or {"code": 0}))
        if i.guard is not None:
            index, negated = self.d.guard(i, i.guard)
            values |= {"guard": index, "negated": int(negated)}
        self.ops.append(tuple(values.get(name, 0) for name in _OP.names or ()))

    def _list(self, numbers: Iterable[int]) -> int:
        first = len(self.lists)
        self.lists += numbers
        return first

    def _words(self, i: Instruction, operand: Operand) -> list[int]:
        return [self.d.source(i, one, _WORD) for one in self.d.parts(operand)]

    def _form(self, i: Instruction) -> dict[str, int] | None:
        special = getattr(self, f"_{i.opcode}", None)
        fields: dict[str, int] | None = special(i) if special else None
        return fields or self._elementwise(i)

    def _elementwise(self, i: Instruction) -> dict[str, int] | None:
        name, to = i.name, i.operands[0]
        if i.opcode == "cvt":
            name += f">{self.d.register(i, to).width}"
        if name not in _FORMS or isinstance(to, Pair):
            return None
        (destination, *sources), value = _FORMS[name]
        if len(i.operands) != len(sources) + 1:
            return None
        fields = {
            "code": _CODE[_codes()[(destination, *sources, value)]],
            "out": self._index(i, to, destination),
        }
        for field, operand, kind in zip("abc", i.operands[1:], sources, strict=False):
            if kind == "u8" and isinstance(operand, Number):
                operand = Number(int(operand.value != 0))
            fields[field] = self._index(i, operand, kind)
        if i.opcode == "cvta":
            window = _WINDOW.get(next(m for m in i.modifiers if m != "to"), 0)
            fields["immediate"] = -window if i.has("to") else window
        return fields

    def _index(self, i: Instruction, operand: Operand, kind: str) -> int:
        return self.d.source(i, operand, _FLAG if kind == "u8" else typed(f"b{kind[1:]}"))

    def _address(self, i: Instruction, operand: Operand, width: int) -> dict[str, int]:
        """The register of an address, one that is added to it or -1, and their width."""
        d = self.d
        if not isinstance(operand, Address) or operand.coordinates:
            raise d.unknown(i)
        if not isinstance(operand.base, Name) or operand.base.text not in d.slots:
            place = d.symbol(i, operand.base) + operand.offset
            return {"a": d.constant(place, width), "b": -1, "d": width}
        slot = d.pointer(i, operand.base)
        added = d.constant(operand.offset, slot.width) if operand.offset else -1
        return {"a": slot.index, "b": added, "d": slot.width}

    def _memory(self, i: Instruction, place: Operand, parts: Sequence[Operand]) -> dict[str, int]:
        """What loads and stores have in common; only weak ones are described."""
        if strength(i).scope:
            return {}
        d, kind = self.d, self.d.type(i)
        space = space_of(d, i, i.modifiers[:-1])
        slots = [stored(d, i, kind, one) for one in parts]
        fields = {"bytes": kind.bytes, "count": len(parts), "extend": int(kind.signed)}
        fields["out"] = self._list(n for view, index in slots for n in (_WIDTH[view], index))
        base = place.base if isinstance(place, Address) else None
        if space == "param" and isinstance(base, Name) and base.text in d.kernel.parameters:
            assert isinstance(place, Address)
            first = d.kernel.parameters[base.text].offset + place.offset
            if not 0 <= first < _FARTHEST:  # a fault, which Python describes
                return {}
            return {**fields, "code": _CODE["LDPARAM"], "immediate": first}
        address = self._address(i, place, 32 if space in NARROW else 64)
        return {**fields, **address, "c": _SPACE[space]}

    def _ld(self, i: Instruction) -> dict[str, int] | None:
        to = self.d.parts(i.operands[0])
        if any(not isinstance(one, Name) or one.text not in self.d.slots for one in to):
            return None  # a constant is no place for a value
        fields = self._memory(i, i.operands[1], to)
        return fields and {"code": _CODE["LD"], **fields}

    def _st(self, i: Instruction) -> dict[str, int] | None:
        fields = self._memory(i, i.operands[0], self.d.parts(i.operands[1]))
        return fields and {"code": _CODE["ST"], **fields}

    def _matrix(self, i: Instruction, place: Operand, words: Operand, code: str) -> dict[str, int]:
        fields = self._address(i, place, 32)
        registers = self._words(i, words)
        fields |= {
            "out": self._list(registers),
            "count": len(registers),
            "c": int(i.has("trans")),
        }
        return {**fields, "code": _CODE[code]}

    def _ldmatrix(self, i: Instruction) -> dict[str, int] | None:
        if not i.has("m8n8"):
            return None
        return self._matrix(i, i.operands[1], i.operands[0], "LDMATRIX")

    def _stmatrix(self, i: Instruction) -> dict[str, int]:
        return self._matrix(i, i.operands[0], i.operands[1], "STMATRIX")

    def _mma(self, i: Instruction) -> dict[str, int] | None:
        if i.has("kind::mxf4nvf4", "scale_vec::4X"):
            (byte_a, lane_a), (byte_b, lane_b) = (
                [self.d.source(i, one, typed("u16")) for one in self.d.parts(i.operands[n])]
                for n in (5, 7)
            )
            scales = {
                "a": self._words(i, i.operands[4])[0],
                "b": self._words(i, i.operands[6])[0],
            }
            form = {"code": _CODE["NVFP4"], "c": lane_a, "d": lane_b, "bytes": byte_a,
                    "count": byte_b, **scales}  # fmt: skip
        elif re.search(r"\.m16n8k16\.row\.col\.f32\.(b?f16)\.\1\.f32$", i.name):
            form = {"code": _CODE["HALVES"], "c": int(i.has("bf16"))}
        else:
            return None
        words = [self._words(i, one) for one in i.operands[:4]]
        return {**form, "out": self._list(n for some in words for n in some)}

    def _bra(self, i: Instruction) -> dict[str, int]:
        return {"code": _CODE["BRA"], "immediate": i.target}

    def _prmt(self, i: Instruction) -> dict[str, int] | None:
        if i.modifiers != ("b32",):
            return None
        out, a, b, c = (self.d.source(i, one, _WORD) for one in i.operands)
        return {"code": _CODE["PRMT"], "out": out, "a": a, "b": b, "c": c}

    def _lop3(self, i: Instruction) -> dict[str, int] | None:
        table = i.operands[4]
        if not isinstance(table, Number) or len(i.operands) > 5:
            return None
        out, a, b, c = (self.d.source(i, one, _WORD) for one in i.operands[:4])
        return {
            "code": _CODE["LOP3"],
            "out": out,
            "a": a,
            "b": b,
            "c": c,
            "immediate": table.value & 255,
        }

    def _mov(self, i: Instruction) -> dict[str, int] | None:
        vector = next((one for one in i.operands if isinstance(one, Vector)), None)
        if vector is None or i.modifiers[-1] not in ("b32", "b64"):
            return None
        whole, part = (
            self.d.type(i),
            typed(f"b{self.d.type(i).bits // len(vector.parts)}"),
        )
        to, source = i.operands
        left_out = Name("_") if to is vector else None
        parts = [-1 if one == left_out else self.d.source(i, one, part) for one in vector.parts]
        if to is vector and (whole.bits, len(parts)) == (32, 4):
            a = self.d.source(i, source, whole)
            return {"code": _CODE["MOVBYTES"], "out": self._list(parts), "a": a}
        low, high = parts
        if to is vector:
            a = self.d.source(i, source, whole)
            return {
                "code": _CODE[f"MOVUNPACK{part.bits}"],
                "out": low,
                "b": high,
                "a": a,
            }
        out = self.d.source(i, to, whole)
        return {"code": _CODE[f"MOVPACK{part.bits}"], "out": out, "a": low, "b": high}

    def _ex2(self, i: Instruction) -> dict[str, int] | None:
        name = {"ex2.approx.f32": "EX2", "ex2.approx.ftz.f32": "EX2FTZ"}.get(i.name)
        to, a = i.operands
        kind = typed("b32")
        return name and {
            "code": _CODE[name], "out": self.d.source(i, to, kind), "a": self.d.source(i, a, kind)
        }  # type: ignore[return-value]  # fmt: skip

    def _fma(self, i: Instruction) -> dict[str, int] | None:
        if i.name != "fma.rn.ftz.f32":
            return None
        out, a, b, c = (self.d.source(i, one, _WORD) for one in i.operands)
        return {"code": _CODE["FMAFTZ"], "out": out, "a": a, "b": b, "c": c}

    def _shfl(self, i: Instruction) -> dict[str, int]:
        to, flag = i.operands[0], -1
        if isinstance(to, Pair):
            flag, to = self.d.source(i, to.second, _FLAG), to.first
        out, a, b, c, members = (self.d.source(i, one, _WORD) for one in (to, *i.operands[1:5]))
        mode = _SHUFFLES.index(i.modifiers[1])
        return {"code": _CODE["SHFL"], "out": out, "extend": flag, "a": a, "b": b, "c": c,
                "count": members, "d": mode}  # fmt: skip

    def _elect(self, i: Instruction) -> dict[str, int]:
        to = i.operands[0]
        assert isinstance(to, Pair)
        out = -1 if to.first == Name("_") else self.d.source(i, to.first, _WORD)
        flag = self.d.source(i, to.second, _FLAG)
        return {"code": _CODE["ELECT"], "out": out, "b": flag,
                "a": self.d.source(i, i.operands[1], _WORD)}  # fmt: skip

    def _vote(self, i: Instruction) -> dict[str, int]:
        mode = next(word for word in i.modifiers if word != "sync")
        predicate = i.operands[1]
        negated = isinstance(predicate, Negated)
        a = self.d.source(i, predicate.name if isinstance(predicate, Negated) else predicate, _FLAG)
        out = self.d.source(i, i.operands[0], _WORD if mode == "ballot" else _FLAG)
        members = self.d.source(i, i.operands[2], _WORD)
        return {"code": _CODE["VOTE"], "out": out, "a": a, "b": members, "c": int(negated),
                "d": _VOTES.index(mode)}  # fmt: skip

    def table(self) -> tuple[Any, Any]:
        """The instructions and the lists of registers that they name."""
        return np.array(self.ops, _OP), np.array(self.lists, np.int32)


# ------------------------------------------------------------------------------ a launch's core


def _at(array: Any) -> int:
    """The address of an array's data."""
    address: int = array.__array_interface__["data"][0]
    return address


def _seen(clocks: VectorClocks, block: int | None) -> _Clocks:
    """What was seen, of all blocks or of one, as core.c reads it."""
    if block is None:
        return _of_blocks(clocks.table)
    return _one(clocks.seen.get(block))


def _fenced(clocks: VectorClocks, block: int | None, *, shared: bool) -> _Clocks:
    """What is fenced of shared or of global memory, of all blocks or of one."""
    if block is None:
        return _of_blocks(clocks.fenced_table(shared=shared))
    return _one(clocks.fenced.get(2 * block + (not shared)))


def _of_blocks(table: Table) -> _Clocks:
    return _Clocks(*table.at, len(table.lengths), None, 0)


def _one(clock: Any) -> _Clocks:
    """The clocks of a block; without any, nothing of it is known."""
    return _Clocks(length=len(clock), one=_at(clock)) if clock is not None else _Clocks()


class LaunchCore:
    """A launch as core.c sees it."""

    def __init__(
        self,
        table: tuple[Any, Any],
        state: LaunchState,
        ends: Any,
        gathers: Any,
        executions: Any,
    ) -> None:
        self.state, self.races = state, state.races
        self._references: list[Any] = [table, ends, gathers, executions]
        ops, lists = table
        self.count = len(ops)
        self.launch = _Launch(
            ops=_at(ops),
            lists=_at(lists),
            ends=_at(ends),
            gathers=_at(gathers),
            executions=_at(executions),
        )
        self.launch.op_count, self.launch.list_count = len(ops), len(lists)
        self.launch.rows[:] = state.layout.rows
        self._check(ops)
        self._set_regions(state.memory.regions)
        data = np.frombuffer(state.launch.parameters or b"\0", np.uint8)
        self._references.append(data)
        self.launch.parameters = _at(data)
        self.launch.parameter_bytes = len(state.launch.parameters)
        self._events = _Events()
        self._columns: Any = None
        if self.races:
            self.launch.events = ctypes.addressof(self._events)
            self.races.core = self
            self._known = np.zeros(_KNOWN_RACES, np.uint64)
            self.launch.reported, self.launch.reported_room = _at(self._known), len(self._known)
        self._address = ctypes.addressof(self.launch)
        self._known_count = 0

    def _check(self, ops: Any) -> None:
        """Let the core look at its table, before it runs any of it.

        Raises:
            PtxError: an instruction has a register, a list or a target that is not there.
        """
        first = core().check(ctypes.addressof(self.launch))
        if first < self.count:
            raise PtxError("an instruction that the core refuses", int(ops["line"][first]))

    def _set_regions(self, regions: Sequence[Region]) -> None:
        """What memory there is now; ``malloc`` adds more, which is left to Python."""
        ordered = sorted(regions, key=lambda one: one.address)
        if any(one.end > other.address for one, other in pairwise(ordered)):
            return
        table = (_Region * max(len(regions), 1))()
        for one, region in zip(table, regions, strict=False):
            one.address, one.size = region.address, len(region.data)
            one.data, one.writable = _at(region.data), region.writable
            self._references.append(region.data)  # ``free`` drops a region, but not its memory
            if self.races and region.writable:
                one.shadow = self._shadow(self.races.shadow(region))
        self._references.append(table)
        self.launch.regions, self.launch.region_count = (
            ctypes.addressof(table),
            len(regions),
        )

    def _shadow(self, shadow: Shadow) -> int:
        """The address of a shadow's tables, which changes as they are made."""
        struct = _Shadow(size=shadow.size, shift=shadow.shift, warps=shadow.warps)

        def update() -> None:
            for name in ("writes", "reads", "atomics", "copies"):
                table = getattr(shadow, name)
                setattr(struct, name, None if table is None else _at(table))

        update()
        shadow.updated, shadow.core = update, ctypes.addressof(struct)
        return shadow.core

    def block(self, block: Block) -> _Block:
        """A block as core.c sees it."""
        struct = _Block(launch=ctypes.addressof(self.launch), shared=_at(block.shared.bytes),
                       shared_bytes=block.shared.size)  # fmt: skip
        if block.races:
            struct.shadow = self._shadow(block.races.shared)
            struct.times, struct.number = _at(block.races.times), block.races.number
        return struct

    def knows_all(self, slots: Any, clocks: VectorClocks, block: int | None) -> bool:
        """Whether earlier accesses are all known; ``block``: they are all of this one."""
        if not slots.flags.forc or slots.dtype != np.int32:
            slots = np.ascontiguousarray(slots, np.int32)
        self.begin()
        return not core().unknown(
            _at(slots), slots.size, ctypes.addressof(self._events),
            ctypes.byref(_seen(clocks, block)),
        )  # fmt: skip

    def watch_copy(
        self, shadow: Shadow, slot: int, places: Any, clocks: VectorClocks, block: int | None, *,
        write: bool, fenced: bool,
    ) -> bool:  # fmt: skip
        """Check an access of a copy, and remember it.

        ``block``: its memory is of this one alone.  ``fenced``: it sees only the writes of threads
        that a ``fence.proxy.async`` follows.  False if it may be a race, which Python looks at.
        """
        self.begin()
        seen = _seen(clocks, block)
        known = _fenced(clocks, block, shared=bool(shadow.warps)) if fenced else None
        return bool(
            core().watch_copy(
                self._address, shadow.core, write, _at(places), len(places), slot,
                ctypes.byref(seen), known and ctypes.byref(known),
            )
        )  # fmt: skip

    def reported(
        self, line: int, other: int, table: int, relation: int, *, shared: bool, half: bool
    ) -> None:
        """A race was reported, and need not be looked at again.

        ``table``: as in core.c.  ``relation``: 1 in the same warp, 2 in another block.  ``half``:
        another lane of the other's warp handed over.
        """
        self._known_count += core().report(
            self._address, self._known_count, line, other, table, shared, relation, half
        )

    def begin(self) -> None:
        """Before instructions run: the events so far."""
        assert self.races is not None
        events = self.races.events
        if events.count >= len(events.clock):
            events.grow()
        if events.clock is not self._columns:
            self._columns = events.clock
            for name in events.KINDS:
                setattr(self._events, name, _at(getattr(events, name)))
            self._events.room = len(events.clock)
        self._events.count = events.count

    def end(self) -> None:
        """After they ran: new events, and stores to global memory."""
        if self.races:
            self.races.events.count = self._events.count
        if stores := self.launch.stores:
            self.state.events += stores
            self.launch.stores = 0


class WarpCore:
    """A warp as core.c sees it."""

    def __init__(self, launch: LaunchCore, warp: Warp) -> None:
        self.launch, self.warp = launch, warp
        self._local: Any = None
        self._knows: Any = None
        #: what it knows of other blocks was not asked for yet
        self._narrow = True
        self._others: Any = None
        block = warp.block
        if block.core is None:
            block.core = launch.block(block)
        rows = np.zeros(2 * launch.count, np.int32) if block.races else np.zeros(0, np.int32)
        self._rows = rows
        half, word, wide, pred = (warp.files[view] for view in (U16, U32, U64, PRED))
        assert [len(one) for one in (pred, half, word, wide)] == [*launch.launch.rows]
        self.struct = _Warp(
            block=ctypes.addressof(block.core), pred=_at(pred), half=_at(half), word=_at(word),
            wide=_at(wide), rows=_at(rows), number=warp.number, last=-1, spins=_at(warp.spins),
        )  # fmt: skip
        self._address = ctypes.addressof(self.struct)
        self._places = np.frombuffer(self.struct.places, np.int64)
        self._mask, self._stopped = (
            np.frombuffer(one, np.bool_) for one in (self.struct.mask, self.struct.stopped)
        )
        self._run, self._watch = core().run, core().watch
        if block.races:
            block.races.cores[warp.number] = self

    def run(self, mask: Any) -> int:
        """Go on, with all lanes or with some; why it stopped."""
        warp, struct = self.warp, self.struct
        if warp.local is not self._local:
            self._local = warp.local
            struct.local, struct.local_bytes = _at(warp.local), warp.local.shape[1]
        if warp.block.races:
            self._refresh(warp.block.races)
        struct.apart, struct.waited = mask is not True, warp.waited
        self._stopped[...] = warp.at_barrier
        if mask is not True:
            assert warp.pcs is not None
            self._mask[...], self._places[...] = mask, warp.pcs
        reason: int = self._run(self._address)
        self.launch.end()
        warp.waited = bool(struct.waited)
        return reason

    def lanes(self) -> Any:
        """The lanes that run now, after some have parted or met; all of them as ``True``."""
        warp = self.warp
        warp.alone = False
        if self.struct.apart:
            warp.pcs, mask = self._places.copy(), self._mask.copy()
            warp.latest_lanes = mask
            return mask
        warp.pcs = None
        return True

    def watch(
        self, kind: int, shadow: Shadow, row: int, scope: int, lanes: Any, offsets: Any, size: int,
        changed: Any,
    ) -> int:  # fmt: skip
        """Check an access that Python runs, and remember it.

        ``kind``: `READ`, `WRITE` or `ADD`.  The result is 0 if it may be a race, which Python looks
        at, and nothing was remembered; 2 if it is a strong read of what a strong write left.
        """
        assert self.warp.block.races is not None
        self._refresh(self.warp.block.races)
        places = np.ascontiguousarray(offsets, np.int64)
        threads = None if lanes is None else np.ascontiguousarray(lanes, np.int64)
        new = None if changed is None else np.ascontiguousarray(changed, np.bool_)
        result: int = self._watch(
            self._address, shadow.core, kind, row, scope, len(places),
            None if threads is None else _at(threads), _at(places), size,
            None if new is None else _at(new),
        )  # fmt: skip
        return result

    def _refresh(self, races: Races) -> None:
        """What the warp knows by now, and the events so far."""
        knows = races.knows[self.warp.number]
        if knows is not self._knows:
            self._learn(knows, races.number)
        elif self._narrow and isinstance(knows, VectorClocks):
            self._learn_others(knows)
        self.launch.begin()

    def _learn(self, knows: Any, block: int) -> None:
        """What the lanes know of their own block: the same, or each its own."""
        self._knows, struct = knows, self.struct
        self._narrow, struct.blocks = True, 0
        if isinstance(knows, VectorClocks):
            seen = knows.seen.get(block)
            struct.knows = 1
            struct.seen[:] = [None if seen is None else _at(seen)] * 32
            struct.length[:] = [0 if seen is None else len(seen)] * 32
            return
        struct.knows = len(knows)
        places = {}
        for one in knows:
            if id(one) not in places:
                seen = one.seen.get(block)
                places[id(one)] = (None, 0) if seen is None else (_at(seen), len(seen))
        struct.seen[:] = [places[id(one)][0] for one in knows]
        struct.length[:] = [places[id(one)][1] for one in knows]

    def _learn_others(self, knows: VectorClocks) -> None:
        """What all lanes know of other blocks, once it is asked for."""
        self._narrow = False
        if len(knows.seen) > 1:
            table = self._others = knows.table
            self.struct.others, self.struct.lengths = table.at
            self.struct.blocks = len(table.lengths)
