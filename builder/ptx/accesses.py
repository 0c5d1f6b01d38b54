"""Instructions on memory: loads, stores, atomics, asynchronous copies and mbarriers.

PTX ISA, "Data Movement and Conversion Instructions: ld, st", its parts on asynchronous copies, and
"Parallel Synchronization and Communication Instructions: atom, red" and "mbarrier".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.block import STORE, Operation, first_block
from builder.ptx.decoder import (
    PRED,
    U16,
    U32,
    U64,
    Decoder,
    Emitter,
    Mask,
    Slot,
    Step,
    Target,
    Type,
)
from builder.ptx.floats import double
from builder.ptx.machine import (
    FUNCTIONS,
    LOCAL_WINDOW,
    PARAMETERS,
    RANK_SHIFT,
    SHARED_BASE,
    SHARED_WINDOW,
    Fault,
    flush,
    one_nan,
)
from builder.ptx.memory import TensorMap
from builder.ptx.races import BLOCK, CLUSTER, GRID, VOLATILE, WEAK, joined
from builder.ptx.registers import HALVES, greater, lesser, load_parameter, typed
from builder.ptx.source import Address, Instruction, Name, Number, Operand, Vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from builder.ptx.block import Block, Mbarrier, Warp
    from builder.ptx.races import Copy, Races, VectorClocks

# --------------------------------------------------------------------------------- loads and stores


_VIEW_OF = {16: U16, 32: U32, 64: U64}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
#: Bytes of the largest access of a thread: ``.v8.b32`` and ``.v4.b64``.
_LARGEST = 32
#: Modifiers of loads and stores that change no value here: caching, order and scope.  Those of
#: ``YIELDING`` also let other warps run: a loop on them waits for another thread.
YIELDING = {"acquire", "relaxed", "volatile"}
_ORDER = {"weak", "release", "acq_rel", "mmio", "cta", "gpu", "sys", "cluster", *YIELDING}
_CACHING = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"}


@dataclass(frozen=True)
class Strength:
    """The strength of an access, its scope, and whether it acquires or releases."""

    scope: int
    acquire: bool
    release: bool

    @staticmethod
    def _key(at: int, owner: Block | None) -> object:
        return (owner.place, at) if owner else at

    def load(self, w: Warp, lanes: Any, at: Any, owner: Block | None = None) -> None:
        """A strong read by lanes, in order, of global or of a block's shared memory."""
        races = w.block.races
        if races is None:
            return
        for lane, one in zip(lanes.tolist(), at.tolist(), strict=True):
            key = self._key(one, owner)
            races.load_strong(w.number, lane, key, self.scope, acquire=self.acquire)

    def store(self, w: Warp, lanes: Any, at: Any, owner: Block | None = None) -> None:
        """A strong store by lanes, in order."""
        races = w.block.races
        if races is None:
            return
        for lane, one in zip(lanes.tolist(), at.tolist(), strict=True):
            key = self._key(one, owner)
            races.store_strong(w.number, lane, key, self.scope, release=self.release, adds=False)

    def begin(
        self, w: Warp, space: str, owner: Block, lanes: Any, at: Any, size: int, line: int
    ) -> None:
        """Lanes are about to run an atomic."""
        races = w.block.races
        if races and space == "global":
            memory = w.block.state.memory
            races.strongs(w.number, lanes, at, size, line, self.scope, memory)
        elif races and space == "shared":
            offsets = owner.shared.offsets(at, size)
            races.strong(w.number, lanes, offsets, size, line, self.scope, owner.shadow)

    def swap(
        self, w: Warp, lanes: Any, at: Any, writes: Any, owner: Block | None, *, reads: bool
    ) -> None:  # fmt: skip
        """Lanes ran an atomic, one after the other; a comparison that failed wrote nothing.

        ``reads``: it is ``atom``.  ``red`` is no read operation (PTX ISA, table "Operation Types"),
        so that it acquires nothing.
        """
        races, scope = w.block.races, self.scope
        if races is None:
            return
        for lane, one, changes in zip(lanes.tolist(), at.tolist(), writes.tolist(), strict=True):
            key = self._key(one, owner)
            if reads:
                races.load_strong(w.number, lane, key, scope, acquire=self.acquire)
            if changes:
                races.store_strong(w.number, lane, key, scope, release=self.release, adds=True)


def _in_loop(d: Decoder, i: Instruction) -> bool:
    """Whether a later branch goes back to an instruction or before it."""
    code = d.kernel.code
    place = next((at for at, one in enumerate(code) if one is i), len(code))
    return any(one.opcode == "bra" and one.target <= place for one in code[place:])


def strength(i: Instruction, *, polls: bool = False) -> Strength:
    """The strength that modifiers give; ``volatile`` is relaxed, and atomics are without one.

    ``polls``: a ``volatile`` load in a loop, which may wait for another thread.
    """
    words = set(i.modifiers)
    both = "acq_rel" in words
    strong = i.opcode in ("atom", "red") or words & {"acquire", "release", *YIELDING}
    scope = BLOCK if "cta" in words else CLUSTER if "cluster" in words else GRID
    scope = scope if strong else WEAK
    scope = VOLATILE if "volatile" in words and not polls else scope
    return Strength(scope, both or "acquire" in words, both or "release" in words)


_PLAIN = Strength(WEAK, acquire=False, release=False)
_SPACES = {
    "global": "global", "const": "global", "shared": "shared", "shared::cta": "shared",
    "shared::cluster": "cluster", "local": "local", "param": "param",
}  # fmt: skip
#: State spaces whose addresses have 32 bits.
NARROW = ("shared", "cluster")


def space_of(d: Decoder, i: Instruction, words: Iterable[str]) -> str:
    """``shared`` of the own block, ``cluster`` of any, ``local``, ``param``, ``global`` or
    ``generic``, of words without the type."""
    spaces = [m for m in words if m not in _ORDER and m not in _VECTORS and m not in _CACHING]
    spaces = [m for m in spaces if not m.startswith(("L1::", "L2::")) and m != "cache_hint"]
    if not spaces:
        return "generic"
    if len(spaces) > 1 or spaces[0] not in _SPACES:
        raise d.unknown(i)
    return _SPACES[spaces[0]]


def _count(d: Decoder, i: Instruction, registers: int) -> int:
    counts = [_VECTORS[m] for m in i.modifiers if m in _VECTORS]
    count = counts[0] if counts else 1
    if registers != count:
        raise d.unknown(i, f"{registers} registers for {count} elements")
    kind = d.type(i)
    if len(counts) > 1 or count * kind.bytes > _LARGEST:
        raise d.unknown(i, f"more than {_LARGEST} bytes")
    return count


def _slots(d: Decoder, i: Instruction, kind: Type, parts: tuple[Any, ...]) -> list[Slot]:
    slots = [d.register(i, part) for part in parts]
    if any(slot.width < kind.bits or slot.width not in _VIEW_OF for slot in slots):
        raise d.unknown(i, "a register is narrower than the type")
    return slots


#: The first addresses of the windows of the generic address space, and what they are of.
_WINDOWS = np.array([LOCAL_WINDOW, SHARED_WINDOW, FUNCTIONS, PARAMETERS], np.uint64)
_WINDOW_OF = (("global", 0), ("local", LOCAL_WINDOW), ("cluster", SHARED_WINDOW),
              ("function", 0), ("param", 0))  # fmt: skip


def _by_window(at: Any) -> Iterator[tuple[str, Any, Any]]:
    """Generic addresses by state space: the space, which they are, and the addresses in it."""
    number = np.searchsorted(_WINDOWS, at.astype(np.uint64), side="right")
    first = int(number[0])
    if (number == first).all():
        space, begin = _WINDOW_OF[first]
        yield space, slice(None), at - np.uint64(begin)
        return
    for one in {*number.tolist()}:
        space, begin = _WINDOW_OF[one]
        which = np.flatnonzero(number == one)
        yield space, which, at[which] - np.uint64(begin)


def _by_owner(w: Warp, space: str, at: Any) -> Iterator[tuple[str, Block, Any, Any]]:
    """Addresses by state space, and those of shared memory by its block."""
    every = np.arange(len(at))
    spaces = _by_window(at) if space == "generic" else [(space, slice(None), at)]
    for kind, which, places in spaces:
        if kind != "cluster":
            yield kind, w.block, every[which], places
            continue
        for owner, part, own in w.block.owners(places):
            yield "shared", owner, every[which][part], own


def read_shared(
    w: Warp, owner: Block, lanes: Any, at: Any, size: int, line: int, order: Strength = _PLAIN
) -> Any:
    """The same of a block's shared memory; without lanes, of the whole warp together."""
    offsets = owner.shared.offsets(at, size)
    if w.block.races:
        w.block.races.read(w.number, lanes, offsets, size, line, order.scope, owner.shadow)
    if order.scope:
        order.load(w, lanes, at, owner)
    return owner.shared.load(offsets, size)


def write_shared(
    w: Warp, owner: Block, lanes: Any, at: Any, rows: Any, line: int, order: Strength = _PLAIN
) -> None:
    """Store rows to a block's shared memory; without lanes, of the whole warp together."""
    shared, races = owner.shared, w.block.races
    offsets = shared.offsets(at, rows.shape[1])
    if races and owner.shadow:
        scope, shadow = order.scope, owner.shadow
        races.stores(w.number, lanes, offsets, rows, line, scope, shared.bytes, shadow)
    shared.store(offsets, rows)
    if order.scope:
        order.store(w, lanes, at, owner)


def read_rows(
    w: Warp, space: str, lanes: Any, at: Any, size: int, line: int, order: Strength = _PLAIN,
    owner: Block | None = None,
) -> Any:  # fmt: skip
    """``size`` bytes from the address of each lane, one row each."""
    match space:
        case "shared":
            return read_shared(w, owner or w.block, lanes, at, size, line, order)
        case "local":
            return w.local[_local(w, lanes, at, size)]
        case "global":
            at, memory, races = at.astype(np.int64), w.block.state.memory, w.block.races
            if races:
                races.reads(w.number, lanes, at, size, line, order.scope, memory)
            rows = memory.load(at, size)
            if order.scope:
                order.load(w, lanes, at)
            return rows
        case "param":
            return _parameter_bytes(w, at, size)
        case "generic" | "cluster":
            rows = np.empty((len(at), size), np.uint8)
            for kind, one, which, places in _by_owner(w, space, at):
                rows[which] = read_rows(w, kind, lanes[which], places, size, line, order, one)
            return rows
        case _:
            raise Fault(f"an access to the address of a function, {int(at[0]):#x}")


def write_rows(
    w: Warp, space: str, lanes: Any, at: Any, rows: Any, line: int, order: Strength = _PLAIN,
    owner: Block | None = None,
) -> None:  # fmt: skip
    """Store the row of each lane at its address."""
    match space:
        case "shared":
            write_shared(w, owner or w.block, lanes, at, rows, line, order)
        case "local":
            w.local[_local(w, lanes, at, rows.shape[1])] = rows
        case "global":
            at, memory, races = at.astype(np.int64), w.block.state.memory, w.block.races
            if races:
                races.writes(w.number, lanes, at, rows, line, order.scope, memory)
            memory.store(at, rows)
            w.block.state.events += 1
            if order.scope:
                order.store(w, lanes, at)
        case "generic" | "cluster":
            for kind, one, which, places in _by_owner(w, space, at):
                write_rows(w, kind, lanes[which], places, rows[which], line, order, one)
        case _:
            raise Fault(f"a store to a {space}, at {int(at[0]):#x}")


def memory_of(space: str | None) -> str:
    """The state space of a modifier; without one, generic addresses."""
    return _SPACES[space] if space else "generic"


def _parameter_bytes(w: Warp, at: Any, size: int) -> Any:
    data = np.frombuffer(w.block.state.launch.parameters, np.uint8)
    places = at.astype(np.int64) - PARAMETERS
    if ((places < 0) | (places + size > len(data))).any():
        raise Fault("a read beyond the last parameter")
    return data[places[:, None] + np.arange(size)]


def read_generic(w: Warp, lane: int, address: int, size: int) -> Any:
    """Bytes at a generic address of one lane; no race is looked for."""
    space, _, at = next(_by_window(np.array([address & _ADDRESS], np.uint64)))
    if space == "cluster":
        owner, place = w.block.owner(int(at[0]))
        return owner.shared.load(owner.shared.offsets(np.array([place]), size), size)[0]
    return read_rows(w, space, np.array([lane]), at, size, 0)[0]


#: All bits of an address.
_ADDRESS = 2**64 - 1


def local_row(w: Warp, lane: int, at: int, size: int) -> Any:
    """Bytes of one lane's local memory."""
    return w.local[lane, at : at + size]


def _note_size(d: Decoder, space: str, size: int) -> None:
    """Record the size of an access, for the race detector."""
    if space in (*NARROW, "generic"):
        d.shared_sizes.add(size)
    if space in ("global", "generic"):
        d.global_sizes.add(size)


def _of_halves(d: Decoder, i: Instruction) -> Instruction:
    """A load or store of 128 bits is one of two registers of 64."""
    if i.modifiers[-1:] != ("b128",):
        return i
    operands = (Vector(d.halves(o)) if isinstance(o, Name) else o for o in i.operands)
    return replace(i, modifiers=(*i.modifiers[:-1], "v2", "b64"), operands=tuple(operands))


def _load(d: Decoder, i: Instruction) -> Step:
    """``ld``: a wider register is extended by sign or with zeros."""
    i = _of_halves(d, i)
    kind, space = d.type(i), space_of(d, i, i.modifiers[:-1])
    base = i.operands[1].base if isinstance(i.operands[1], Address) else None
    if space == "param" and not (isinstance(base, Name) and base.text in d.slots):
        return load_parameter(d, i)
    parts = d.parts(i.operands[0])
    size = kind.bytes * _count(d, i, len(parts))
    slots = _slots(d, i, kind, parts)
    address = d.address(i, i.operands[1], 32 if space in NARROW else 64)
    read = np.dtype(f"{'i' if kind.signed else 'u'}{kind.bytes}")
    _note_size(d, space, kind.bytes)
    yields = bool(YIELDING & set(i.modifiers))
    order, line = strength(i, polls=i.has("volatile") and _in_loop(d, i)), i.line

    def run(w: Warp, m: Mask) -> None:
        w.yielded |= yields
        at = address(w) if m is True else address(w)[m]
        rows = read_rows(w, space, w.lanes(m), at, size, line, order)
        values = np.ascontiguousarray(rows).view(read)
        for number, slot in enumerate(slots):
            row = w.views[_VIEW_OF[slot.width]][slot.index]
            row[... if m is True else m] = values[:, number].astype(row.dtype)

    return run


def _store(d: Decoder, i: Instruction) -> Step:
    """``st``: the low part of a wider register."""
    i = _of_halves(d, i)
    kind, space = d.type(i), space_of(d, i, i.modifiers[:-1])
    parts = d.parts(i.operands[1])
    size = kind.bytes * _count(d, i, len(parts))
    sources = [stored(d, i, kind, part) for part in parts]
    address = d.address(i, i.operands[0], 32 if space in NARROW else 64)
    element = np.dtype(f"u{kind.bytes}")
    _note_size(d, space, kind.bytes)
    order, line = strength(i), i.line

    def run(w: Warp, m: Mask) -> None:
        at = address(w) if m is True else address(w)[m]
        rows = np.empty((len(at), len(sources)), element)
        for number, (view, index) in enumerate(sources):
            value = w.views[view][index]
            rows[:, number] = (value if m is True else value[m]).astype(element)
        data = rows.view(np.uint8).reshape(len(at), size)
        write_rows(w, space, w.lanes(m), at, data, line, order)

    return run


def _local(w: Warp, lanes: Any, at: Any, size: int) -> tuple[Any, Any]:
    """Rows and columns of local memory: each lane has its own.

    Raises:
        Fault: an address is outside, or not a multiple of ``size``.
    """
    places = at.astype(np.int64)
    wrong = (places < 0) | (places + size > w.local.shape[1]) | (places % size != 0)
    if wrong.any():
        raise Fault(
            f"local memory offset {int(places[wrong][0])} ({size} bytes) is outside the "
            f"thread's {w.local.shape[1]} bytes, or not a multiple of {size}"
        )
    return lanes[:, None], places[:, None] + np.arange(size)


def stored(d: Decoder, i: Instruction, kind: Type, part: Any) -> tuple[int, int]:
    """View and index of a value to store, whose register may be wider."""
    name = getattr(part, "text", "")
    if name in d.slots:
        slot = d.slots[name]
        if slot.width < kind.bits:
            raise d.unknown(i, "a register is narrower than the type")
        return _VIEW_OF[slot.width], slot.index
    return _VIEW_OF[max(kind.bits, 16)], d.source(i, part, kind)


# ---------------------------------------------------------------------------------------- atomics


#: numpy's types of the elements; halves by their bits.
_ELEMENT = {
    "u32": "u4", "s32": "i4", "b32": "u4", "u64": "u8", "s64": "i8", "b64": "u8", "b16": "u2",
    "f32": "f4", "f64": "f8", "f16": "u2", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4",
}  # fmt: skip
#: The new value from the old one and the operands, by operation.
_ATOMIC: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda old, a, _: old + a,
    "exch": lambda _old, a, _: a,
    "cas": lambda old, a, b: np.where(old == a, b, old),
    "and": lambda old, a, _: old & a,
    "or": lambda old, a, _: old | a,
    "xor": lambda old, a, _: old ^ a,
    "min": lambda old, a, _: np.minimum(old, a),
    "max": lambda old, a, _: np.maximum(old, a),
    "inc": lambda old, a, _: np.where(old >= a, 0, old + 1),
    "dec": lambda old, a, _: np.where((old == 0) | (old > a), a, old - 1),
}
_INTEGERS = {"u32", "s32", "u64", "s64"}
_ATOMIC_TYPES: dict[str, set[str]] = {
    "add": _INTEGERS - {"s64"} | {"f32", "f64", "f16", "bf16", "f16x2", "bf16x2"},
    "exch": {"b32", "b64"}, "cas": {"b16", "b32", "b64"},
    **{name: {"b32", "b64"} for name in ("and", "or", "xor")},
    **{name: _INTEGERS | {"f16", "bf16", "f16x2", "bf16x2"} for name in ("min", "max")},
    "inc": {"u32"}, "dec": {"u32"},
}  # fmt: skip


def _in_halves(operation: str, name: str) -> Callable[[Any, Any, Any], Any]:
    """An operation on values of 16 bits, or pairs of them, each rounded once."""
    decode, encode = HALVES[name.removesuffix("x2")]
    functions: dict[str, Any] = {"min": lesser, "max": greater, "add": np.add}
    function = functions[operation]

    def of(old: Any, a: Any, _b: Any) -> Any:
        parts = (decode(np.ascontiguousarray(one).view(np.uint16)) for one in (old, a))
        result = encode(function(*parts))
        return result.astype(np.uint16).view(old.dtype)

    return of


def _f32_sum(old: Any, a: Any, _b: Any) -> Any:
    return one_nan(old + a)


def _f32_sum_flushed(old: Any, a: Any, _b: Any) -> Any:
    """In global memory subnormal numbers are zero ("Parallel Synchronization ...: atom")."""
    return one_nan(flush(flush(old) + flush(a)))


_SUM_OF_DOUBLES = double("add", "rn")


def _f64_sum(old: Any, a: Any, _b: Any) -> Any:
    return _SUM_OF_DOUBLES(a, old)


def _f64_sum_of_global(old: Any, a: Any, _b: Any) -> Any:
    """In global memory a NaN stays as it is (recorded on an H100)."""
    total = _SUM_OF_DOUBLES(a, old)
    return np.where(np.isnan(a), a, np.where(np.isnan(old), old, total))


def _function(operation: str, kind: str, space: str) -> Callable[[Any, Any, Any], Any]:
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _in_halves(operation, kind)
    if kind == "f32":
        return _f32_sum if space in NARROW else _f32_sum_flushed
    if kind == "f64":
        return _f64_sum if space in NARROW else _f64_sum_of_global
    return _ATOMIC[operation]


def _atomic(d: Decoder, i: Instruction) -> Step:
    """``atom`` returns the previous value, ``red`` nothing; lane after lane.

    Each element of a vector is a separate operation; its address is a multiple of its size.
    Only a changed value counts as progress, so that spinning on a lock is a deadlock.
    """
    without = {"noftz", "L2::cache_hint", *_VECTORS}  # with a hint, its policy is an operand more
    *words, name = [m for m in i.modifiers if m not in without]
    operation = next((word for word in words if word in _ATOMIC), "")
    words = [word for word in words if word != operation]
    count = next((_VECTORS[m] for m in i.modifiers if m in _VECTORS), 1)
    if name in _VECTORS or name not in _ATOMIC_TYPES.get(operation, ()):
        raise d.unknown(i)
    space = space_of(d, i, words)
    if space not in ("global", *NARROW, "generic") or (count > 1 and space != "global"):
        raise d.unknown(i)
    function, element = _function(operation, name, space), np.dtype(_ELEMENT[name])
    kind = typed(f"b{8 * element.itemsize}")
    gives = i.opcode == "atom"
    operands = i.operands[1:] if gives else i.operands
    to = d.parts(i.operands[0]) if gives else ()
    outs = [d.out(i, one, kind) if one != Name("_") else -1 for one in to]
    address = d.address(i, operands[0], 32 if space in NARROW else 64)
    inputs = 2 if operation == "cas" else 1
    sources = [d.parts(one) for one in operands[1 : 1 + inputs]]
    if any(len(one) != count for one in [*sources, *([outs] if gives else [])]):
        raise d.unknown(i, f"no {count} elements")
    values = [[d.source(i, one, kind) for one in part] for part in sources]
    size, view, line = element.itemsize * count, kind.view, i.line
    _note_size(d, space, min(4, element.itemsize))
    order = strength(i)

    def run(w: Warp, m: Mask) -> None:
        w.yielded = True
        lanes, rows = w.lanes(m), w.views[view]
        every = address(w)[lanes]
        parts = [np.stack([rows[one][lanes] for one in each], 1).view(element) for each in values]
        for kind_of, owner, here, at in _by_owner(w, space, every):
            at = at.astype(np.int64)
            order.begin(w, kind_of, owner, lanes[here], at, size, line)
            for turn in _turns(at):
                place, mine = at[turn], here[turn]
                raw = _cells(w, kind_of, owner, lanes[mine], place, size)
                old = np.ascontiguousarray(raw).view(element).reshape(-1, count)
                new = function(old, parts[0][mine], parts[-1][mine]).astype(element)
                data = np.ascontiguousarray(new).view(np.uint8).reshape(-1, size)
                _cells(w, kind_of, owner, lanes[mine], place, size, data)
                w.block.state.events += int(np.count_nonzero(data != raw))
                if w.block.races and kind_of != "local":
                    writes = (
                        (old == parts[0][mine]).all(1) if operation == "cas" else np.ones(len(mine))
                    )
                    of = owner if kind_of == "shared" else None
                    order.swap(w, lanes[mine], place, writes, of, reads=gives)
                for number, out in enumerate(outs):
                    if out >= 0:
                        rows[out][lanes[mine]] = old[:, number].view(rows[out].dtype)

    return run


def _turns(at: Any) -> Iterator[Any]:
    """Lanes with different addresses, those of the same address one after the other."""
    if len({*at.tolist()}) == len(at):
        yield slice(None)
        return
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    begins = np.r_[True, ordered[1:] != ordered[:-1]]
    turn = np.empty(len(at), np.int64)
    turn[order] = np.arange(len(at)) - np.maximum.accumulate(
        np.where(begins, np.arange(len(at)), 0)
    )
    for number in range(int(turn.max()) + 1):
        yield np.flatnonzero(turn == number)


def _cells(
    w: Warp, space: str, owner: Block, lanes: Any, at: Any, size: int, data: Any = None
) -> Any:
    """Read, or write ``data``, as a part of an atomic operation."""
    memory, shared = w.block.state.memory, owner.shared
    places: Any
    cells: Any
    if space == "shared":
        places, cells = shared.offsets(at, size)[:, None] + np.arange(size), shared.bytes
    elif space == "local":
        places, cells = _local(w, lanes, at, size), w.local
    elif space == "global" and data is None:
        return memory.load(at, size)
    elif space == "global":
        memory.store(at, data)
        return data
    else:
        raise Fault(f"an atomic in a {space}, at {int(at[0]):#x}")
    if data is not None:
        cells[places] = data
    return cells[places]


#: Emitters by opcode.
MEMORY: dict[str, Emitter] = {
    "ld": _load,
    "st": lambda d, i: (_store_async if i.has("async") else _store)(d, i),
    "atom": _atomic,
    "red": lambda d, i: (_store_async if i.has("async") else _atomic)(d, i),
}


# -------------------------------------------------------------- copies of single elements: cp.async


_WORD = typed("b32")
#: The kind of these operations.
_ELEMENTS = "elements"
#: Bytes that one thread may copy, by cache operator.
_COPY_SIZES = {"ca": (4, 8, 16), "cg": (16,)}


def element_copy(d: Decoder, i: Instruction) -> Step:
    """``cp.async`` that is not bulk."""
    words = i.modifiers[1:]
    if words == ("commit_group",):
        return commit_group(_ELEMENTS)
    if words in (("wait_group",), ("wait_all",)):
        return wait_group(_ELEMENTS, d, i)
    if words[:2] == ("mbarrier", "arrive"):
        return _arrive_after_copies(d, i)
    # prefetching into L2 changes no value; a cache policy is one more operand
    cache, *spaces = (w for w in words if not re.fullmatch(r"L2::\d+B", w))
    if cache in _COPY_SIZES and spaces in (["shared", "global"], ["shared::cta", "global"]):
        return _copy_elements(d, i, _COPY_SIZES[cache])
    raise d.unknown(i)


def _copy_elements(d: Decoder, i: Instruction, sizes: tuple[int, ...]) -> Step:
    """``cp.async.ca`` and ``.cg``: with a ``src-size`` the bytes after it are zero."""
    size = i.operands[2]
    if not isinstance(size, Number) or size.value not in sizes or len(i.operands) > 4:
        raise d.unknown(i)
    count, line = size.value, i.line
    to, source = d.address(i, i.operands[0]), d.address(i, i.operands[1], 64)
    length = d.source(i, i.operands[3], _WORD) if len(i.operands) == 4 else None
    d.shared_sizes.add(4)

    def run(w: Warp, m: Mask) -> None:
        block = w.block
        lanes = w.lanes(m)
        offsets = block.shared.offsets(to(w)[lanes], count)
        origin = source(w)[lanes].astype(np.int64)
        lengths = None if length is None else np.minimum(w.views[U32][length][lanes], count)
        races = block.races
        copy = races.issue(w.number, lanes, (_ELEMENTS,), line, generic=True) if races else None

        def act() -> None:
            rows = _read_elements(block, origin, count, lengths)
            if races and copy:
                races.copy_scatters(copy, lanes, offsets, count)
            elements = block.shared.elements[count]
            elements[offsets // count] = rows.view(elements.dtype).reshape(-1)

        operation = Operation(_ELEMENTS, act, line, copy=copy)
        block.groups(_ELEMENTS, w.number).add(operation, lanes)
        block.issue(operation)

    return run


def _arrive_after_copies(d: Decoder, i: Instruction) -> Step:
    """``cp.async.mbarrier.arrive``: each lane arrives once all that it has copied is there.

    The arrival needs no count of its own: without ``.noinc`` the phase first gets one more.
    """
    address, raises = _in_shared(d, i, i.operands[0]), not i.has("noinc")

    def run(w: Warp, m: Mask) -> None:
        lanes, places, races = w.lanes(m), address(w), w.block.races
        if races:
            _note_use(races, w, lanes, places[lanes], i.line)
        for place in {*places[lanes].tolist()}:
            here = lanes[places[lanes] == place]
            owner, own = w.block.owner(place)
            owner.mbarrier(own).pending += len(here) if raises else 0
            copies = w.block.groups(_ELEMENTS, w.number).of(here)
            clocks = races.released(w.number, here) if races else None

            def act(here: Any = here, owner: Block = owner, own: int = own,
                    copies: list[Operation] = copies, clocks: Any = clocks) -> None:  # fmt: skip
                for copy in copies:
                    if not copy.done:
                        w.block.perform(copy)
                if races:
                    done = [races.parts(one.copy, here) for one in copies if one.copy]
                    clocks = joined([clocks, *done])
                owner.arrive(own, len(here), clocks)

            w.block.issue(Operation("load", act, i.line))

    return run


def _read_elements(block: Block, origin: Any, count: int, lengths: Any) -> NDArray[np.uint8]:
    """``count`` bytes from each address of global memory, only the first ``lengths`` are read."""
    memory = block.state.memory
    if lengths is None:
        return memory.load(origin, count)
    rows = np.zeros((len(origin), count), np.uint8)
    whole = lengths == count
    rows[whole] = memory.load(origin[whole], count) if np.count_nonzero(whole) else 0
    for row in np.flatnonzero(~whole & (lengths > 0)):
        places = origin[row] + np.arange(int(lengths[row]))
        rows[row, : int(lengths[row])] = memory.load(places, 1)[:, 0]
    return rows


def commit_group(kind: str) -> Step:
    """``commit_group``: close a group of a lane's operations of a kind since its last group."""

    def run(w: Warp, m: Mask) -> None:
        w.block.groups(kind, w.number).commit(m)

    return run


def wait_group(kind: str, d: Decoder, i: Instruction) -> Step:
    """``wait_group N``: wait until at most the N latest groups of each lane are pending."""
    every = i.has("wait_all")  # also those that are in no group yet
    number = Number(0) if every else i.operands[0]
    if not isinstance(number, Number):
        raise d.unknown(i)
    latest = number.value
    place = next(at for at, one in enumerate(d.kernel.code) if one is i)

    def run(w: Warp, m: Mask) -> Target:
        groups = w.block.groups(kind, w.number)
        if every:
            groups.commit(m)
        due = groups.due(m, latest)
        late = [operation for operation in due if not operation.done]
        if late:
            for operation in late:
                operation.awaited = True
            w.yielded = True
            return place
        if w.block.races:
            for operation in due:
                if kind == _ELEMENTS and operation.copy:
                    w.block.races.finished(w.number, operation.copy, w.lanes(m))
                else:
                    w.block.races.acquire(w.number, operation.clocks, w.lanes(m))
        groups.waited(m, latest)
        return None

    return run


# ---------------------------------------------------------------------------------------- mbarriers


_FLAG = typed("pred")
#: Modifiers of mbarrier operations: an mbarrier orders all threads that use it, of any block.
_SCOPES = {
    "shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "relaxed", "cta",
    "cluster",
}  # fmt: skip


def _mbarrier(d: Decoder, i: Instruction) -> Step:
    """``mbarrier``: each operation, by its words."""
    words = [m for m in i.modifiers if m not in _SCOPES]
    forms: dict[str, Emitter] = {
        "init": _initialise,
        "inval": _invalidate,
        "pending_count": _pending,
        **dict.fromkeys(
            ("arrive", "arrive expect_tx", "arrive noComplete", "arrive_drop",
             "arrive_drop expect_tx", "arrive_drop noComplete", "expect_tx", "complete_tx"),
            _arrive,
        ),
        **dict.fromkeys(("try_wait parity", "test_wait parity", "try_wait", "test_wait"), _wait),
    }  # fmt: skip
    emitter = forms.get(" ".join(words))
    if emitter is None:
        raise d.unknown(i)
    return emitter(d, i)


#: What stands for an address that is none of shared memory; the bits above its place there.
_NOWHERE, _HIGH = 0xFFFFFFF0, np.uint64(32)


def _in_shared(d: Decoder, i: Instruction, operand: Operand) -> Callable[[Warp], Any]:
    """The computation of an address in shared memory; of a generic one, its place there."""
    address = d.address(i, operand)

    def places(w: Warp) -> Any:
        every = address(w)
        if every.dtype == np.uint32:
            return every
        wrong = (every >> _HIGH != 0) & (every >> _HIGH != SHARED_WINDOW >> 32)
        return np.where(wrong, np.uint64(_NOWHERE), every).astype(np.uint32)

    return places


def _pending(d: Decoder, i: Instruction) -> Step:
    """``mbarrier.pending_count``: of a state that an arrival returned."""
    out, state = d.out(i, i.operands[0], _WORD), d.source(i, i.operands[1], typed("b64"))

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        w.views[U32][out][lanes] = w.views[U64][state][lanes] >> 1

    return run


def _initialise(d: Decoder, i: Instruction) -> Step:
    address, count = _in_shared(d, i, i.operands[0]), d.source(i, i.operands[1], _WORD)

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            at = int(address(w)[lane])
            before, number = w.block.mbarriers.get(at), int(w.views[U32][count][lane])
            w.block.initialise(at, number)
            if w.block.races:
                changed = before is None or before != w.block.mbarriers[at]
                w.block.races.initialised(w.number, int(lane), at, i.line, changed=changed)

    return run


def _invalidate(d: Decoder, i: Instruction) -> Step:
    address = _in_shared(d, i, i.operands[0])

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            w.block.mbarrier(int(address(w)[lane]))
            w.block.mbarriers.pop(int(address(w)[lane]))

    return run


def _note_use(races: Races, w: Warp, lanes: Any, places: Any, line: int) -> None:
    """Tell the race detector of lanes that use mbarriers; a place without one is a fault before."""
    for owner, which, at in w.block.owners(places):
        for place in {*at.tolist()}:
            owner.mbarrier(place)
        races.uses_mbarrier(w.number, lanes[which], at, line, owner.shadow)


def _arrive(d: Decoder, i: Instruction) -> Step:
    """Each lane arrives, once or ``count`` times; ``expect_tx`` first raises the expected bytes.

    The state that it may return is opaque: here the arrivals that are missing, and the phase.
    """
    expects, drop = i.has("expect_tx"), i.has("arrive_drop")
    arrives, relaxed = i.has("arrive") or drop, i.has("relaxed")
    operands = list(i.operands)
    returns = arrives and operands[0] != Name("_")
    state = d.out(i, operands[0], typed("b64")) if returns else -1
    place, *rest = operands[1:] if arrives else operands
    address = _in_shared(d, i, place)
    amount = d.source(i, rest[0], _WORD) if rest else d.constant(1, 32)
    if returns and i.has("shared::cluster"):
        raise d.unknown(i, "a state of another block's mbarrier")

    def run(w: Warp, m: Mask) -> None:
        races, lanes, places = w.block.races, w.lanes(m), address(w)
        clocks: dict[int, VectorClocks] = {}
        if races:
            _note_use(races, w, lanes, places[lanes], i.line)
            for place in {*places[lanes].tolist()} if arrives and not relaxed else ():
                here = lanes[places[lanes] == place]
                clocks[place] = races.released(w.number, here)
        for lane in lanes:
            at, number = int(places[lane]), int(w.views[U32][amount][lane])
            owner, own = w.block.owner(at)
            barrier = owner.mbarrier(own)
            if expects:
                owner.expect(own, number)
            if state >= 0:
                w.views[U64][state][lane] = barrier.pending << 1 | barrier.phase
            if arrives:
                one = 1 if expects else number
                _arrive_once(i, owner, barrier, (own, one), clocks.get(at))
            elif not expects:
                owner.transferred(own, number, None)

    return run


def _arrive_once(
    i: Instruction, owner: Block, barrier: Mbarrier, arrival: tuple[int, int],
    clocks: VectorClocks | None,
) -> None:  # fmt: skip
    """A lane arrives at an address, with a count."""
    phase = barrier.phase
    owner.arrive(*arrival, clocks, drop=i.has("arrive_drop"))
    if i.has("noComplete") and barrier.phase != phase:
        raise Fault("an arrival with .noComplete that completes the phase")


def _wait(d: Decoder, i: Instruction) -> Step:
    """``try_wait``: may wait; whether the phase of a parity, or of a state, is complete."""
    flag, address = d.out(i, i.operands[0], _FLAG), _in_shared(d, i, i.operands[1])
    by_parity, acquires = i.has("parity"), not i.has("relaxed")
    parity = d.source(i, i.operands[2], _WORD if by_parity else typed("b64"))

    def run(w: Warp, m: Mask) -> None:
        places = address(w)
        parities = w.views[U32][parity] if by_parity else w.views[U64][parity] & np.uint64(1)
        if w.block.races:
            lanes = w.lanes(m)
            _note_use(w.block.races, w, lanes, places[lanes], i.line)
        if m is True and not np.count_nonzero((places != places[0]) | (parities != parities[0])):
            one = w.block.passed(int(places[0]), int(parities[0]))
            if one and w.block.races and acquires:
                completed = w.block.mbarrier(int(places[0])).sync.completed
                w.block.races.acquire(w.number, completed)
            w.views[PRED][flag][...] = one
            if not one:
                w.yielded, w.awaited = True, (int(places[0]), int(parities[0]))
            return
        pairs = {(int(places[lane]), int(parities[lane])) for lane in w.lanes(m)}
        passed = {pair: w.block.passed(*pair) for pair in pairs}
        for lane in w.lanes(m):
            pair = int(places[lane]), int(parities[lane])
            w.views[PRED][flag][lane] = passed[pair]
            if passed[pair] and w.block.races and acquires:
                completed = w.block.mbarrier(pair[0]).sync.completed
                w.block.races.acquire(w.number, completed, np.array([lane]))
        w.yielded |= not all(passed.values())

    return run


# --------------------------------------------------------------------------------- tensor copies


def _copy(d: Decoder, i: Instruction) -> Step:
    """``cp.async.bulk``: bytes and tiles of tensors, between global and shared memory; groups."""
    words = i.modifiers
    if words[:2] != ("async", "bulk"):
        return element_copy(d, i)
    if words[2:] == ("commit_group",):
        return commit_group(STORE)
    if words[2:3] == ("wait_group",) and set(words[3:]) <= {"read"}:
        return wait_group(STORE, d, i)
    if words[2:3] == ("tensor",):
        rest = [m for m in words[4:] if m not in ("tile", "L2::cache_hint")]
        if _loads(rest):
            return _load_tile(d, i)
        if rest == ["global", "shared::cta", "bulk_group"]:
            return _store_tile(d, i)
    return _copy_bytes(d, i)


def _copy_bytes(d: Decoder, i: Instruction) -> Step:
    """``cp.async.bulk`` of bytes that are no tensor's; a prefetch changes no value."""
    rest = [m for m in i.modifiers[2:] if m != "L2::cache_hint"]
    if rest[0] == "prefetch":
        return lambda _w, _m: None
    if _loads(rest) or rest == ["shared::cluster", "shared::cta", _COUNTED]:
        return _load_bytes(d, i)
    if rest == ["global", "shared::cta", "bulk_group"]:
        return _store_bytes(d, i)
    raise d.unknown(i)


_COUNTED, _MULTICAST = "mbarrier::complete_tx::bytes", "multicast::cluster"


def _loads(words: Sequence[str]) -> bool:
    """Whether words are those of a copy from global to shared memory."""
    return words[1:3] == ["global", _COUNTED] and (
        words[3:] == [] or [words[0], *words[3:]] == ["shared::cluster", _MULTICAST]
    ) and words[0] in ("shared::cta", "shared::cluster")  # fmt: skip


def _multicast(d: Decoder, i: Instruction, place: int) -> Callable[[Warp, int], int | None]:
    """The mask of the blocks that a copy of a lane is for; None without a multicast."""
    if not i.has(_MULTICAST):
        return lambda _w, _lane: None
    mask = d.source(i, i.operands[place], typed("b16"))
    return lambda w, lane: int(w.views[U16][mask][lane])


def _targets(
    block: Block, place: int, signal: int, mask: int | None
) -> list[tuple[Block, int, int]]:
    """The blocks that a copy writes to, with its place and its mbarrier there."""
    if mask is not None:
        at, where = place % (1 << RANK_SHIFT), signal % (1 << RANK_SHIFT)
        return [(block.peer(rank), at, where) for rank in range(16) if mask >> rank & 1]
    (owner, at), (other, where) = block.owner(place), block.owner(signal)
    if owner is not other:
        raise Fault(f"a copy to {owner.name} that counts for an mbarrier of {other.name}")
    return [(owner, at, where)]


def _load_bytes(d: Decoder, i: Instruction) -> Step:
    """``cp.async.bulk``: bytes to shared memory, which count for the mbarrier.

    They are of global memory, or of the own block's shared memory.  The addresses and the size are
    multiples of 16.
    """
    of_global, line = i.has("global"), i.line
    to, barrier = _in_shared(d, i, i.operands[0]), _in_shared(d, i, i.operands[3])
    source = d.address(i, i.operands[1], 64) if of_global else _in_shared(d, i, i.operands[1])
    size, blocks = d.source(i, i.operands[2], _WORD), _multicast(d, i, 4)

    def start(w: Warp, lane: int) -> None:
        block, count = w.block, int(w.views[U32][size][lane])
        place, origin, signal = int(to(w)[lane]), int(source(w)[lane]), int(barrier(w)[lane])
        if count % 16 or place % 16 or origin % 16:
            first = place - SHARED_BASE
            raise Fault(f"a copy of {count} bytes from {origin:#x} to offset {first}: not by 16")
        if of_global:
            region = block.state.memory.find(origin, origin + count)
            at, data = origin - region.address, region.data
        else:
            at, data = origin - SHARED_BASE, block.shared.bytes
            _check_fits(f"a copy of {count} bytes from", at, count, block)

        def read(copy: Copy | None) -> Any:
            if block.races and copy and of_global:
                block.races.copy_global(copy, region, np.array([at]), count)
            elif block.races and copy:
                block.races.copy_reads(copy, block.races.shared.span(at, count))
            return data[at : at + count]

        for owner, own, where in _targets(block, place, signal, blocks(w, lane)):
            first = own - SHARED_BASE
            _check_fits(f"a copy of {count} bytes to", first, count, owner)
            cells = owner.shared.bytes[first : first + count]

            def write(copy: Copy | None, cells: Any = cells) -> None:
                cells[...] = read(copy)

            _load_bulk(w, lane, (owner, own, where), count, write, line)

    return _each_lane(start)


def _store_bytes(d: Decoder, i: Instruction) -> Step:
    """``cp.async.bulk``: bytes from shared to global memory, as part of the lane's bulk group.

    The addresses and the size are multiples of 16.
    """
    to, source = d.address(i, i.operands[0], 64), _in_shared(d, i, i.operands[1])
    size, line = d.source(i, i.operands[2], _WORD), i.line

    def operands(w: Warp, lane: int) -> tuple[int, ...]:
        return int(to(w)[lane]), int(source(w)[lane]), int(w.views[U32][size][lane])

    def start(w: Warp, lanes: Any, target: int, place: int, count: int) -> None:
        block, first = w.block, place - SHARED_BASE
        if count % 16 or place % 16 or target % 16:
            raise Fault(f"a copy of {count} bytes from offset {first} to {target:#x}: not by 16")
        _check_fits(f"a copy of {count} bytes from", first, count, block)

        def write(copy: Copy | None) -> None:
            region = block.state.memory.find(target, target + count, write=True)
            at = target - region.address
            before = region.data[at : at + count].copy()
            region.data[at : at + count] = block.shared.bytes[first : first + count]
            if block.races and copy:
                block.races.copy_global(copy, region, np.array([at]), count, before[None])

        _store_bulk(w, lanes, place, count, write, line)

    return _each_store(operands, start)


def _store_bulk(
    w: Warp, lanes: Any, place: int, size: int, write: Callable[[Copy | None], None], line: int,
    tensor: int = 0,
) -> None:  # fmt: skip
    """Issue a copy from shared memory, as part of the lanes' open bulk groups.

    ``tensor``: the address of its tensor map, if it has one.
    """
    block, races = w.block, w.block.races
    copy = races.issue(w.number, lanes, (STORE, place), line) if races else None

    def act() -> None:
        if races and copy:
            races.copy_reads(copy, races.shared.span(place - SHARED_BASE, size))
        write(copy)

    operation = block.issue(Operation(STORE, act, line, copy=copy, map=tensor))
    block.groups(STORE, w.number).add(operation, lanes)


def _each_store(operands: Callable[[Warp, int], tuple[int, ...]], start: Any) -> Step:
    """Each active lane issues a store; those of the same operands are one.

    CUTLASS lets all lanes of a warp store a tile: each stores the same bytes to the same place.
    """

    def run(w: Warp, m: Mask) -> None:
        lanes: dict[tuple[int, ...], list[int]] = {}
        for lane in w.lanes(m).tolist():
            lanes.setdefault(operands(w, lane), []).append(lane)
        for values, mine in lanes.items():
            start(w, np.array(mine), *values)

    return run


def _check_fits(words: str, first: int, size: int, block: Block) -> None:
    total = block.shared.size
    if first < 0 or first + size > total:
        raise Fault(f"{words} offset {first} of {total} bytes")


def _load_bulk(
    w: Warp,
    lane: int,
    target: tuple[Block, int, int],
    size: int,
    write: Callable[[Copy | None], None],
    line: int,
    room: int = 0,
) -> None:
    """Issue a copy to a block's shared memory, at a place, whose bytes count for its mbarrier.

    ``room``: the bytes that it takes there, if they are others.
    """
    block, (owner, place, signal) = w.block, target
    owner.mbarrier(signal)
    races, key = block.races, (owner.rank, place, signal)
    copy = races.issue(w.number, np.array([lane]), key, line) if races else None
    if races and owner.races and copy:
        races.signals(copy, signal, owner.races)

    def act() -> None:
        if owner is not block:
            block.peer(owner.rank)
        write(copy)
        clocks = None
        if races and owner.shadow and copy:
            span = owner.shadow.span(place - SHARED_BASE, room or size)
            races.copy_writes(copy, span, owner.shadow)
            clocks = races.finish(copy)
        owner.transferred(signal, size, clocks)

    block.issue(Operation("load", act, line, copy=copy))


#: Types of ``st.async``; and of ``red.async``, by operation.
_STORED = {"b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64"}
_REDUCED = {
    "add": {"u32", "s32", "u64"}, "min": {"u32", "s32"}, "max": {"u32", "s32"},
    "inc": {"u32"}, "dec": {"u32"}, "and": {"b32"}, "or": {"b32"}, "xor": {"b32"},
}  # fmt: skip


def _store_async(d: Decoder, i: Instruction) -> Step:
    """``st.async`` and ``red.async``: to a block's shared memory, counting for its mbarrier."""
    spaces = {"async", "weak", "relaxed", "cluster", "shared::cluster", _COUNTED, *_VECTORS}
    *words, name = [m for m in i.modifiers if m not in spaces]
    adds, operation = i.opcode == "red", words[0] if words else ""
    types = _REDUCED.get(operation, set()) if adds else _STORED
    if name not in types or len(words) != adds or not i.has("shared::cluster", _COUNTED):
        raise d.unknown(i)
    kind, parts = d.type(i), d.parts(i.operands[1])
    count = _count(d, i, len(parts))
    to, barrier = _in_shared(d, i, i.operands[0]), _in_shared(d, i, i.operands[2])
    values = [d.source(i, one, typed(f"b{kind.bits}")) for one in parts]
    element, size, line = np.dtype(_ELEMENT[name]), count * kind.bytes, i.line
    function = _function(operation, name, "shared") if adds else lambda _old, new, _: new
    _note_size(d, "shared", kind.bytes)

    def start(w: Warp, lane: int, copy: Copy | None) -> None:
        block, races = w.block, w.block.races
        places = int(to(w)[lane]), int(barrier(w)[lane])
        ((owner, place, signal),) = _targets(block, *places, None)
        offsets = owner.shared.offsets(np.array([place]), size)
        owner.mbarrier(signal)
        rows = w.views[_VIEW_OF[kind.bits]]
        new = np.array([rows[one][lane] for one in values]).view(element)
        cells = owner.shared.bytes[offsets[0] : offsets[0] + size].view(element)

        def act() -> None:
            if owner is not block:
                block.peer(owner.rank)
            cells[...] = function(cells.copy(), new, new)
            clocks = None
            if races and copy:
                one = np.array([lane])
                races.copy_scatters(copy, one, offsets, size, owner.shadow, adds=adds)
                clocks = races.finish(copy, lane)
            owner.transferred(signal, size, clocks)

        block.issue(Operation("load", act, line, copy=copy))

    def run(w: Warp, m: Mask) -> None:
        races, lanes, copy = w.block.races, w.lanes(m), None
        if races:
            scope, key = CLUSTER if adds else WEAK, (i.opcode, line)
            copy = races.issue(w.number, lanes, key, line, generic=True, scope=scope)
        for lane in lanes.tolist():
            start(w, lane, copy)

    return run


# ------------------------------------------------------------------------- clusterlaunchcontrol


def _launch_control(d: Decoder, i: Instruction) -> Step:
    """``clusterlaunchcontrol``: cancels the launch of a cluster, whose work this one then does.

    The response is opaque: here the place of the cluster's first block, and 1 if it was cancelled.
    """
    everyone = f"{_MULTICAST}::all"
    words = tuple(m for m in i.modifiers if m not in ("shared::cta", everyone))
    if words == ("try_cancel", "async", _COUNTED, "b128"):
        return _try_cancel(d, i, everyone=i.has(everyone))
    low, high = (d.source(i, one, typed("b64")) for one in d.halves(i.operands[1]))
    if words == ("query_cancel", "is_canceled", "pred", "b128"):
        flag = d.out(i, i.operands[0], _FLAG)

        def ask(w: Warp, m: Mask) -> None:
            lanes = w.lanes(m)
            cancelled = w.views[U64][high][lanes] >> np.uint64(32) != 0
            w.block.cluster.refused |= not cancelled.all()
            w.views[PRED][flag][lanes] = cancelled

        return ask
    axes = {f"get_first_ctaid::{axis}": (n,) for n, axis in enumerate("xyz")}
    numbers = {"get_first_ctaid": (0, 1, 2), **axes}.get(words[1], ())
    form = ("v4", "b32", "b128") if len(numbers) == 3 else ("b32", "b128")
    if words[:1] != ("query_cancel",) or words[2:] != form or not numbers:
        raise d.unknown(i)
    places = zip(numbers, d.parts(i.operands[0]), strict=False)
    outs = [(number, d.out(i, one, _WORD)) for number, one in places if one != Name("_")]

    def tell(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        parts = np.stack([w.views[U64][low][lanes], w.views[U64][high][lanes]], 1).view(np.uint32)
        if not parts[:, 3].all():
            raise Fault("the first block of a cluster that was not cancelled")
        for number, out in outs:
            w.views[U32][out][lanes] = parts[:, number]

    return tell


def _try_cancel(d: Decoder, i: Instruction, *, everyone: bool) -> Step:
    to, barrier = _in_shared(d, i, i.operands[0]), _in_shared(d, i, i.operands[1])
    line = i.line

    def start(w: Warp, lane: int) -> None:
        block, state = w.block, w.block.state
        if block.cluster.refused:
            raise Fault("a try_cancel after one was seen to fail")
        response = np.zeros(4, np.uint32)
        if state.waiting:
            response[:3] = first_block(state.launch, state.waiting.popleft())
            response[3] = 1
        mask = (1 << len(block.cluster.blocks)) - 1 if everyone else None
        for target in _targets(block, int(to(w)[lane]), int(barrier(w)[lane]), mask):
            first = int(target[0].shared.offsets(np.array([target[1]]), 16)[0])
            cells = target[0].shared.bytes[first : first + 16]

            def write(_copy: Copy | None, cells: Any = cells) -> None:
                cells[...] = response.view(np.uint8)

            _load_bulk(w, lane, target, 16, write, line)

    return _each_lane(start)


def _tensor(d: Decoder, i: Instruction, operand: Operand) -> tuple[Any, list[int]]:
    """Descriptor's address and coordinates of ``[tensor, {coordinates}]``."""
    if not isinstance(operand, Address) or not operand.coordinates:
        raise d.unknown(i, "a tensor's coordinates")
    rank = i.modifiers[3]
    if rank != f"{len(operand.coordinates)}d":
        raise d.unknown(i, f"{len(operand.coordinates)} coordinates")
    where = d.address(i, Address(operand.base, operand.offset), 64)
    return where, [d.source(i, one, _WORD) for one in operand.coordinates]


#: Bytes of a tensor map, and of the parts that a lane reads or writes.
_MAP, _PART = 128, 16


def _parts(address: int) -> Any:
    """The addresses of a tensor map's parts."""
    return np.arange(address, address + _MAP, _PART, dtype=np.uint64)


def _map_at(w: Warp, lane: int, address: int, line: int) -> TensorMap:
    """The tensor map at a generic address, a parameter or in global memory, when a copy is issued.

    A copy reads it through the tensormap proxy, which has what the block acquired last, or else
    what was there before the kernel wrote it.
    """
    block, state = w.block, w.block.state
    if address % 64:
        raise Fault("a tensor map that is not at a multiple of 64 bytes")
    place, data = address - PARAMETERS, state.launch.parameters
    if 0 <= place <= len(data) - _MAP:
        return TensorMap.of(data[place : place + _MAP])
    if address >= int(_WINDOWS[0]):
        raise Fault("a tensor map that is neither a parameter nor in global memory")
    lanes = np.full(_MAP // _PART, lane)
    raw = read_rows(w, "global", lanes, _parts(address), _PART, line).tobytes()
    if block.maps.get(address, state.replaced.get(address, raw)) != raw:
        raise Fault(
            f"a tensor map at {address:#x} that was written, and then used without "
            "fence.proxy.tensormap::generic.acquire in the block after its release"
        )
    return TensorMap.of(raw)


def _global_map(block: Block, address: int) -> bytes:
    region = block.state.memory.find(address, address + _MAP)
    return region.data[address - region.address :][:_MAP].tobytes()


def _replaces(w: Warp, address: int, line: int, *, released: bool) -> None:
    """A warp changes a map in global memory, which no store may still read."""
    block = w.block
    region = block.state.memory.find(address, address + _MAP)
    for store in block.stores_with(address) if block.races else ():
        assert block.races
        if store.copy:
            block.races.replaces_map(w.number, line, store.copy, region, address)
    block.replaces(address, _global_map(block, address), released=released)


def _field(name: str, number: int, new: Any, word: Any) -> dict[int, Any]:
    """What a field of maps becomes, by its offset; ``word`` is word 7, which has high parts."""
    if name == "global_address":
        return {0: new}
    if name == "global_dim":
        return {32 + 4 * number: new - np.uint32(1)}
    part = 4 * number
    high = (new >> np.uint64(36)).astype(np.uint32) & 15
    kept = word & np.uint32(0xFFFFFFFF ^ 15 << part)
    return {12 + part: (new >> np.uint64(4)).astype(np.uint32), 28: kept | high << part}


def _replace(d: Decoder, i: Instruction) -> Step:
    """``tensormap.replace``: the address, a size or a stride of a map in shared or global memory.

    The fields are where the driver has them (`TensorMap.of`).
    """
    name, space = (*i.modifiers[2:4], "", "")[:2]
    kind = {"global_address": "b64", "global_dim": "b32", "global_stride": "b64"}.get(name, "")
    form = ("replace", "tile", name, space, "b1024", kind)
    number = i.operands[1].value if isinstance(i.operands[1], Number) else 0
    if i.modifiers != form or space not in ("global", "shared::cta"):
        raise d.unknown(i)
    if number not in range(5 if name == "global_dim" else 4):
        raise d.unknown(i, "the number of a dimension")
    value, line, memory = d.source(i, i.operands[-1], typed(kind)), i.line, memory_of(space)
    address = _in_shared(d, i, i.operands[0]) if memory == "shared" else d.address(i, i.operands[0])
    for size in (4, 8):
        _note_size(d, memory, size)

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        at, new = address(w)[lanes], w.views[U64 if kind == "b64" else U32][value][lanes]
        for one in at.tolist() if memory == "global" else ():
            _replaces(w, one, line, released=False)
        word = None
        if name == "global_stride":
            word = read_rows(w, memory, lanes, at + 28, 4, line).view(np.uint32)[:, 0]
        for place, values in _field(name, number, new, word).items():
            rows = np.ascontiguousarray(values)[:, None].view(np.uint8)
            write_rows(w, memory, lanes, at + place, rows, line)

    return run


def _publish_map(d: Decoder, i: Instruction) -> Step:
    """``tensormap.cp_fenceproxy``: a warp copies a map to global memory, and releases it."""
    proxy = ("global", "shared::cta", "tensormap::generic", "release")
    size = i.operands[2]
    if i.modifiers[1:5] != proxy or i.modifiers[6:] != ("sync", "aligned"):
        raise d.unknown(i)
    if not isinstance(size, Number) or size.value != _MAP:
        raise d.unknown(i, "a size that is not 128")
    to, source, line = d.address(i, i.operands[0], 64), _in_shared(d, i, i.operands[1]), i.line

    def run(w: Warp, m: Mask) -> None:
        if m is not True and not m.all():
            raise Fault("tensormap.cp_fenceproxy in a part of a warp")
        target, place = to(w), source(w)
        if (target != target[0]).any() or (place != place[0]).any():
            raise Fault("tensormap.cp_fenceproxy with different addresses in a warp")
        address = int(target[0])
        parts = place[0] + np.arange(0, _MAP, _PART, dtype=np.uint32)
        rows = read_shared(w, w.block, None, parts, _PART, line)
        _replaces(w, address, line, released=True)
        write_rows(w, "global", None, _parts(address), rows, line)

    return run


def fence_maps(d: Decoder, i: Instruction) -> Step:
    """``fence.proxy.tensormap::generic``: a block releases its changes, or acquires one map."""
    if i.has("release"):
        return lambda w, _m: w.block.releases_maps()
    size = i.operands[1] if len(i.operands) > 1 else None
    if not i.has("acquire") or not isinstance(size, Number) or size.value != _MAP:
        raise d.unknown(i)
    address = d.address(i, i.operands[0], 64)

    def run(w: Warp, m: Mask) -> None:
        block, state = w.block, w.block.state
        for one in {*address(w)[w.lanes(m)].tolist()} - state.unreleased.keys():
            # CUTLASS's warps that store nothing have none: they acquire address 0
            if any(region.address <= one < region.end for region in state.memory.regions):
                block.maps[one] = _global_map(block, one)

    return run


def _coordinate(values: Any, lane: int) -> int:
    return int(values.view(np.int32)[lane])


def _check_tile(tensor: TensorMap, place: int, block: Block) -> None:
    first = place - SHARED_BASE
    if place % 128:
        raise Fault(f"a tile at shared memory offset {first}, not a multiple of 128")
    _check_fits(f"a tile of {tensor.room} bytes at", first, tensor.room, block)


def _load_tile(d: Decoder, i: Instruction) -> Step:
    """Copy from a tensor to shared memory.

    All of the box's bytes count for the mbarrier, even those outside of the tensor, which are zero.
    """
    to, barrier = _in_shared(d, i, i.operands[0]), _in_shared(d, i, i.operands[2])
    where, coordinates = _tensor(d, i, i.operands[1])
    line, blocks = i.line, _multicast(d, i, 3)

    def start(w: Warp, lane: int) -> None:
        block = w.block
        tensor = _map_at(w, lane, int(where(w)[lane]), line)
        at = [_coordinate(w.views[U32][one], lane) for one in coordinates]
        places = int(to(w)[lane]), int(barrier(w)[lane])
        for target in _targets(block, *places, blocks(w, lane)):
            _check_tile(tensor, target[1], target[0])

            def write(copy: Copy | None, target: tuple[Block, int, int] = target) -> None:
                memory = block.state.memory
                if block.races and copy and not memory.constant(tensor.address):
                    block.races.copy_global(copy, *tensor.reached(memory, at))
                tensor.lay(target[0].shared, target[1], tensor.gather(memory, at))

            _load_bulk(w, lane, target, tensor.size, write, line, tensor.room)

    return _each_lane(start)


def _store_tile(d: Decoder, i: Instruction) -> Step:
    """Copy from shared memory to a tensor, as part of the lane's open bulk group."""
    where, coordinates = _tensor(d, i, i.operands[0])
    source, line = _in_shared(d, i, i.operands[1]), i.line

    def operands(w: Warp, lane: int) -> tuple[int, ...]:
        at = (_coordinate(w.views[U32][one], lane) for one in coordinates)
        return int(where(w)[lane]), int(source(w)[lane]), *at

    def start(w: Warp, lanes: Any, descriptor: int, place: int, *at: int) -> None:
        block = w.block
        tensor = _map_at(w, int(lanes[0]), descriptor, line)
        _check_tile(tensor, place, block)

        def write(copy: Copy | None) -> None:
            region, offsets, unit = tensor.reached(block.state.memory, at)
            if region is None:  # no byte of the tile is inside of the tensor
                return
            before = region.data[offsets[:, None] + np.arange(unit)]
            tensor.scatter(block.state.memory, at, tensor.take(block.shared, place))
            if block.races and copy:
                block.races.copy_global(copy, region, offsets, unit, before)

        _store_bulk(w, lanes, place, tensor.room, write, line, descriptor)

    return _each_store(operands, start)


def _each_lane(start: Callable[[Warp, int], None]) -> Step:
    """Copies are per thread: each active lane issues one."""

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            start(w, int(lane))

    return run


#: Emitters by opcode.
ASYNC: dict[str, Emitter] = {
    "mbarrier": _mbarrier,
    "cp": _copy,
    "clusterlaunchcontrol": _launch_control,
    "tensormap": lambda d, i: (_replace if i.has("replace") else _publish_map)(d, i),
}
