"""Instructions on memory: loads, stores, atomics, asynchronous copies and mbarriers.

PTX ISA, "Data Movement and Conversion Instructions: ld, st", its parts on asynchronous copies, and
"Parallel Synchronization and Communication Instructions: atom, red" and "mbarrier".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.block import STORE, Operation
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
    type_named,
)
from builder.ptx.machine import PARAMETERS, SHARED_BASE, Fault, from_bf16, to_bf16
from builder.ptx.memory import TensorMap
from builder.ptx.races import BLOCK, GRID, VOLATILE, WEAK
from builder.ptx.registers import load_parameter, typed
from builder.ptx.source import Address, Instruction, Name, Number, Operand

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from builder.ptx.block import Block, Warp
    from builder.ptx.races import Copy, VectorClocks

# --------------------------------------------------------------------------------- loads and stores


_VIEW_OF = {16: U16, 32: U32, 64: U64}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
#: Modifiers of loads and stores that change no value here: caching, order and scope.  Those of
#: ``YIELDING`` also let other warps run: a loop on them waits for another thread.
YIELDING = {"acquire", "relaxed", "volatile"}
_ORDER = {"weak", "release", "cta", "gpu", "sys", "cluster", *YIELDING}
_CACHING = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"}


@dataclass(frozen=True)
class Strength:
    """The strength of an access, its scope, and whether it acquires or releases."""

    scope: int
    acquire: bool
    release: bool

    @staticmethod
    def _key(w: Warp, at: int, *, shared: bool) -> object:
        return (w.block.place, at) if shared else at

    def load(self, w: Warp, lanes: Any, at: Any, *, shared: bool) -> None:
        """A strong read by lanes, in order."""
        races = w.block.races
        if races is None:
            return
        for lane, one in zip(lanes.tolist(), at.tolist(), strict=True):
            key = self._key(w, one, shared=shared)
            races.load_strong(w.number, lane, key, self.scope, acquire=self.acquire)

    def store(self, w: Warp, lanes: Any, at: Any, *, shared: bool, adds: bool = False) -> None:
        """A strong write by lanes, in order; ``adds``: of an atomic."""
        races = w.block.races
        if races is None:
            return
        for lane, one in zip(lanes.tolist(), at.tolist(), strict=True):
            key = self._key(w, one, shared=shared)
            races.store_strong(w.number, lane, key, self.scope, release=self.release, adds=adds)

    def begin(self, w: Warp, lanes: Any, at: Any, size: int, line: int) -> None:
        """Lanes are about to run an atomic in global memory."""
        if w.block.races:
            memory = w.block.state.memory
            w.block.races.strongs(w.number, lanes, at, size, line, self.scope, memory)

    def swap(self, w: Warp, lane: int, at: int, *, wrote: bool) -> None:
        """A lane ran an atomic; a comparison that failed wrote nothing."""
        if w.block.races:
            one, place = np.array([lane]), np.array([at])
            self.load(w, one, place, shared=False)
            if wrote:
                self.store(w, one, place, shared=False, adds=True)


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
    scope = (BLOCK if "cta" in words else GRID) if strong else WEAK
    scope = VOLATILE if "volatile" in words and not polls else scope
    return Strength(scope, both or "acquire" in words, both or "release" in words)


def _space(d: Decoder, i: Instruction) -> str:
    """``shared``, ``local`` or ``global``; unknown modifiers are errors."""
    words = [m for m in i.modifiers[:-1] if m not in _ORDER and m not in _VECTORS]
    words = [m for m in words if m not in _CACHING and not m.startswith(("L1::", "L2::"))]
    words = [m for m in words if m != "cache_hint"]
    if words not in (["global"], ["shared"], ["shared::cta"], ["local"]):
        raise d.unknown(i, "of generic addresses" if not words else "")
    return words[0].partition("::")[0]


def _count(d: Decoder, i: Instruction, given: int) -> int:
    count = next((_VECTORS[m] for m in i.modifiers if m in _VECTORS), 1)
    if given != count:
        raise d.unknown(i, f"{given} registers for {count} elements")
    return count


def _slots(d: Decoder, i: Instruction, kind: Type, parts: tuple[Any, ...]) -> list[Slot]:
    slots = [d.register(i, part) for part in parts]
    if any(slot.width < kind.bits for slot in slots):
        raise d.unknown(i, "a register is narrower than the type")
    return slots


def _load(d: Decoder, i: Instruction) -> Step:
    """``ld``: a wider register is extended by sign or with zeros."""
    if i.modifiers[:1] == ("param",):
        return load_parameter(d, i)
    kind, space = d.type(i), _space(d, i)
    parts = d.parts(i.operands[0])
    size = kind.bytes * _count(d, i, len(parts))
    slots = _slots(d, i, kind, parts)
    shared, local, line = space == "shared", space == "local", i.line
    address = d.address(i, i.operands[1], 32 if shared else 64)
    read = np.dtype(f"{'i' if kind.signed else 'u'}{kind.bytes}")
    if space != "local":
        (d.shared_sizes if shared else d.global_sizes).add(kind.bytes)
    yields = bool(YIELDING & set(i.modifiers))
    order = strength(i, polls=i.has("volatile") and _in_loop(d, i))

    def run(w: Warp, m: Mask) -> None:
        w.yielded |= yields
        at = address(w) if m is True else address(w)[m]
        if shared:
            found = w.block.shared.load(at, size, w.number, w.lanes(m), line, order.scope)
        elif local:
            rows, places = _local(w, m, at, size)
            found = w.local[rows, places]
        else:
            at = at.astype(np.int64)
            if w.block.races:
                w.block.races.reads(
                    w.number, w.lanes(m), at, size, line, order.scope, w.block.state.memory
                )
            found = w.block.state.memory.load(at, size)
        if order.scope and w.block.races and not local:
            order.load(w, w.lanes(m), at, shared=shared)
        values = np.ascontiguousarray(found).view(read)
        for number, slot in enumerate(slots):
            row = w.views[_VIEW_OF[slot.width]][slot.index]
            row[... if m is True else m] = values[:, number].astype(row.dtype)

    return run


def _store(d: Decoder, i: Instruction) -> Step:
    """``st``: the low part of a wider register."""
    kind, space = d.type(i), _space(d, i)
    parts = d.parts(i.operands[1])
    size = kind.bytes * _count(d, i, len(parts))
    sources = [_source(d, i, kind, part) for part in parts]
    shared, local, line = space == "shared", space == "local", i.line
    address = d.address(i, i.operands[0], 32 if shared else 64)
    wanted = np.dtype(f"u{kind.bytes}")
    if space != "local":
        (d.shared_sizes if shared else d.global_sizes).add(kind.bytes)
    order = strength(i)

    def run(w: Warp, m: Mask) -> None:
        at = address(w) if m is True else address(w)[m]
        rows = np.empty((len(at), len(sources)), wanted)
        for number, (view, index) in enumerate(sources):
            value = w.views[view][index]
            rows[:, number] = (value if m is True else value[m]).astype(wanted)
        data = rows.view(np.uint8).reshape(len(at), size)
        if shared:
            w.block.shared.store(at, data, w.number, w.lanes(m), line, order.scope)
        elif local:
            w.local[_local(w, m, at, size)] = data
        else:
            at, memory = at.astype(np.int64), w.block.state.memory
            if w.block.races:
                w.block.races.writes(w.number, w.lanes(m), at, data, line, order.scope, memory)
            memory.store(at, data)
            w.block.state.events += 1
        if order.scope and w.block.races and not local:
            order.store(w, w.lanes(m), at, shared=shared)

    return run


def _local(w: Warp, m: Mask, at: Any, size: int) -> tuple[Any, Any]:
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
    return w.lanes(m)[:, None], places[:, None] + np.arange(size)


def _source(d: Decoder, i: Instruction, kind: Type, part: Any) -> tuple[int, int]:
    """View and index of a value to store, whose register may be wider."""
    name = getattr(part, "text", "")
    if name in d.slots:
        slot = d.slots[name]
        if slot.width < kind.bits:
            raise d.unknown(i, "a register is narrower than the type")
        return _VIEW_OF[slot.width], slot.index
    return _VIEW_OF[max(kind.bits, 16)], d.source(i, part, kind)


# ---------------------------------------------------------------------------------------- atomics


def _swap(_old: int, value: int, _other: int) -> int:
    return value


def _compare_and_swap(old: int, compare: int, value: int) -> int:
    return value if old == compare else old


def _bf16_sum(old: int, value: int, _other: int) -> int:
    """The sum of two bfloat16 values, rounded once to nearest even (``.noftz``)."""
    both = from_bf16(np.array([old, value], np.uint16))
    with np.errstate(all="ignore"):
        total = np.array([both[0] + both[1]], np.float32)
    return int(to_bf16(total)[0])


def _bf16x2_sum(old: int, value: int, other: int) -> int:
    halves = (_bf16_sum(old >> s & 0xFFFF, value >> s & 0xFFFF, other) << s for s in (0, 16))
    return sum(halves)


def _f32_sum(old: int, value: int, _other: int) -> int:
    both = np.array([old, value], np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        return int(np.array([both[0] + both[1]], np.float32).view(np.uint32)[0])


def _signed(function: Callable[[int, int], int]) -> Callable[[int, int, int], int]:
    def of(old: int, value: int, _other: int) -> int:
        return function(old - (old >> 31 << 32), value - (value >> 31 << 32)) & 0xFFFFFFFF

    return of


#: The new value from the old one and the operands, by operation and type.
_ATOMIC: dict[tuple[str, str], Callable[[int, int, int], int]] = {
    **{("add", t): (lambda o, v, _: o + v) for t in ("s32", "u32", "u64")},
    **{("exch", t): _swap for t in ("b32", "b64")},
    **{("cas", t): _compare_and_swap for t in ("b32", "b64")},
    ("and", "b32"): lambda o, v, _: o & v,
    ("or", "b32"): lambda o, v, _: o | v,
    ("xor", "b32"): lambda o, v, _: o ^ v,
    ("min", "u32"): lambda o, v, _: min(o, v),
    ("max", "u32"): lambda o, v, _: max(o, v),
    ("min", "s32"): _signed(min),
    ("max", "s32"): _signed(max),
    ("add", "f32"): _f32_sum,
    ("add", "bf16x2"): _bf16x2_sum,
}


def _bf16x2_sums(old: Any, given: Any) -> Any:
    both = (from_bf16(np.ascontiguousarray(words).view(np.uint16)) for words in (old, given))
    return to_bf16(np.add(*both)).astype(np.uint16).view(np.uint32)


#: Sums of many elements at once.
_AT_ONCE: dict[str, Callable[[Any, Any], Any]] = {"u32": np.add, "bf16x2": _bf16x2_sums}


def _atomic(d: Decoder, i: Instruction) -> Step:
    """``atom`` returns the previous value, ``red`` nothing; lane after lane, in global memory.

    Each element of a vector is a separate operation; its address is a multiple of its size.
    Only a changed value counts as progress, so that spinning on a lock is a deadlock.
    """
    words = [m for m in i.modifiers if m not in _ORDER and m not in ("noftz", "acq_rel")]
    count = next((_VECTORS[m] for m in words if m in _VECTORS), 1)
    words = [m for m in words if m not in _VECTORS]
    if count > 1 and i.opcode == "atom":
        raise d.unknown(i)
    if len(words) != 3 or words[0] != "global" or (words[1], words[2]) not in _ATOMIC:
        raise d.unknown(i)
    function = _ATOMIC[words[1], words[2]]
    kind = type_named("b64" if words[2] in ("u64", "b64") else "b32")
    assert kind is not None
    gives = i.opcode == "atom"
    operands = i.operands if gives else (None, *i.operands)
    out = d.out(i, i.operands[0], kind) if gives else -1
    assert operands[1] is not None
    address = d.address(i, operands[1], 64)
    if len(d.parts(i.operands[-1])) != count:
        raise d.unknown(i, f"no {count} elements")
    parts = [d.parts(one) for one in operands[2:] if one is not None]
    values = [[d.source(i, part[n], kind) for part in parts] for n in range(count)]
    wraps, size, view = (1 << kind.bits) - 1, kind.bytes, kind.view
    d.global_sizes.add(kind.bytes)
    order, compares = strength(i), words[1] == "cas"

    def run(w: Warp, m: Mask) -> None:
        w.yielded = True
        lanes = w.lanes(m)
        at = address(w)[lanes].astype(np.int64)
        order.begin(w, lanes, at, size * count, i.line)
        rows = [[w.views[view][one] for one in each] for each in values]
        for which, offsets, data in w.block.state.memory.groups(at, size * count, write=True):
            for lane, offset, place in zip(lanes[which], offsets, at[which], strict=True):
                cells = data[offset : offset + size * count].view(f"u{size}")
                before = int(cells[0])
                for number, row in enumerate(rows):
                    old, given = int(cells[number]), [int(one[lane]) for one in row]
                    cells[number] = new = function(old, given[0], given[-1]) & wraps
                    w.block.state.events += new != old
                order.swap(w, lane, place, wrote=not compares or before == rows[0][0][lane])
                if gives:
                    w.views[view][out][lane] = before

    return run


def _reduce(d: Decoder, i: Instruction) -> Step:
    """``red``: all lanes at once if their addresses differ, else lane after lane."""
    by_lane, function = _atomic(d, i), _AT_ONCE.get(i.modifiers[-1])
    kind = type_named("b32")
    assert kind is not None
    if function is None or not i.has("add"):
        return by_lane
    address = d.address(i, i.operands[0], 64)
    values = [d.source(i, one, kind) for one in d.parts(i.operands[1])]
    order = strength(i)

    def run(w: Warp, m: Mask) -> Target:
        lanes = w.lanes(m)
        at = address(w)[lanes].astype(np.int64)
        if len({*at.tolist()}) < len(at):
            return by_lane(w, m)
        w.yielded = True
        given, size = w.files[U32][values].T[lanes], 4 * len(values)
        order.begin(w, lanes, at, size, i.line)
        order.store(w, lanes, at, shared=False, adds=True)
        for which, offsets, data in w.block.state.memory.groups(at, size, write=True):
            places = offsets[:, None] + np.arange(size)
            old = data[places].view(np.uint32)
            new = function(old, given[which])
            data[places] = new.view(np.uint8)
            w.block.state.events += int(np.count_nonzero(new != old))
        return None

    return run


#: Emitters by opcode.
MEMORY: dict[str, Emitter] = {"ld": _load, "st": _store, "atom": _atomic, "red": _reduce}


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
    if words == ("wait_group",):
        return wait_group(_ELEMENTS, d, i)
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
    taken = d.source(i, i.operands[3], _WORD) if len(i.operands) == 4 else None
    d.shared_sizes.add(4)

    def run(w: Warp, m: Mask) -> None:
        block = w.block
        lanes = w.lanes(m)
        offsets = block.shared.offsets(to(w)[lanes], count)
        origin = source(w)[lanes].astype(np.int64)
        kept = None if taken is None else np.minimum(w.views[U32][taken][lanes], count)
        races = block.races
        copy = races.issue(w.number, lanes, (_ELEMENTS,), line, generic=True) if races else None

        def act() -> None:
            rows = _read_elements(block, origin, count, kept)
            if races and copy:
                races.copy_scatters(copy, lanes, offsets, count)
            elements = block.shared.elements[count]
            elements[offsets // count] = rows.view(elements.dtype).reshape(-1)

        operation = Operation(_ELEMENTS, act, line, copy=copy)
        block.groups(_ELEMENTS, w.number).add(operation, lanes)
        block.issue(operation)

    return run


def _read_elements(block: Block, origin: Any, count: int, kept: Any) -> NDArray[np.uint8]:
    """``count`` bytes from each address of global memory, of which only ``kept`` are read."""
    memory = block.state.memory
    if kept is None:
        return memory.load(origin, count)
    rows = np.zeros((len(origin), count), np.uint8)
    whole = kept == count
    rows[whole] = memory.load(origin[whole], count) if np.count_nonzero(whole) else 0
    for row in np.flatnonzero(~whole & (kept > 0)):
        places = origin[row] + np.arange(int(kept[row]))
        rows[row, : int(kept[row])] = memory.load(places, 1)[:, 0]
    return rows


def commit_group(kind: str) -> Step:
    """``commit_group``: close a group of a lane's operations of a kind since its last group."""

    def run(w: Warp, m: Mask) -> None:
        w.block.groups(kind, w.number).commit(m)

    return run


def wait_group(kind: str, d: Decoder, i: Instruction) -> Step:
    """``wait_group N``: wait until at most the N latest groups of each lane are pending."""
    number = i.operands[0]
    if not isinstance(number, Number):
        raise d.unknown(i)
    latest = number.value
    place = next(at for at, one in enumerate(d.kernel.code) if one is i)

    def run(w: Warp, m: Mask) -> Target:
        groups = w.block.groups(kind, w.number)
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
#: Modifiers of mbarrier operations that are the same in one block.
_SCOPES = {"shared", "shared::cta", "b64", "release", "acquire", "cta"}


def _mbarrier(d: Decoder, i: Instruction) -> Step:
    """``mbarrier.init``, ``arrive``, ``expect_tx``, ``test_wait`` and ``try_wait``."""
    words = [m for m in i.modifiers if m not in _SCOPES]
    known: dict[tuple[str, ...], Emitter] = {
        ("init",): _initialise,
        ("inval",): _invalidate,
        ("arrive",): _arrive,
        ("arrive", "expect_tx"): _arrive,
        ("expect_tx",): _arrive,
        ("try_wait", "parity"): _wait,
        ("test_wait", "parity"): _wait,
    }
    if tuple(words) not in known:
        raise d.unknown(i)
    return known[tuple(words)](d, i)


def _initialise(d: Decoder, i: Instruction) -> Step:
    address, count = d.address(i, i.operands[0]), d.source(i, i.operands[1], _WORD)

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            at = int(address(w)[lane])
            w.block.initialise(at, int(w.views[U32][count][lane]))
            if w.block.races:
                w.block.races.initialised(w.number, int(lane), at, i.line)

    return run


def _invalidate(d: Decoder, i: Instruction) -> Step:
    address = d.address(i, i.operands[0])

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            w.block.mbarrier(int(address(w)[lane]))
            w.block.mbarriers.pop(int(address(w)[lane]))

    return run


def _arrive(d: Decoder, i: Instruction) -> Step:
    """Each lane arrives, once or ``count`` times; ``expect_tx`` first raises the expected bytes.

    The state that it may return is opaque: here the previous phase.  No known form reads it.
    """
    expects, arrives = i.has("expect_tx"), i.has("arrive")
    operands = list(i.operands)
    returns = arrives and operands[0] != Name("_")
    state = d.out(i, operands[0], typed("b64")) if returns else -1
    place, *rest = operands[1:] if arrives else operands
    address = d.address(i, place)
    given = d.source(i, rest[0], _WORD) if rest else d.constant(1, 32)

    def run(w: Warp, m: Mask) -> None:
        races, lanes, places = w.block.races, w.lanes(m), address(w)
        clocks: dict[int, VectorClocks] = {}
        if races:
            races.uses_mbarrier(w.number, lanes, places[lanes], i.line)
            for place in {*places[lanes].tolist()} if arrives else ():
                here = lanes[places[lanes] == place]
                clocks[place] = races.released(w.number, here)
        for lane in lanes:
            at, number = int(places[lane]), int(w.views[U32][given][lane])
            if expects:
                w.block.expect(at, number)
            if state >= 0:
                w.views[U64][state][lane] = w.block.mbarrier(at).phase
            if arrives:
                w.block.arrive(at, 1 if expects else number, clocks.get(at))

    return run


def _wait(d: Decoder, i: Instruction) -> Step:
    """``try_wait.parity``: may wait, and returns whether the phase of that parity is complete."""
    flag = d.out(i, i.operands[0], _FLAG)
    address, parity = d.address(i, i.operands[1]), d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        places, parities = address(w), w.views[U32][parity]
        if w.block.races:
            lanes = w.lanes(m)
            w.block.races.uses_mbarrier(w.number, lanes, places[lanes], i.line)
        if m is True and not np.count_nonzero((places != places[0]) | (parities != parities[0])):
            one = w.block.passed(int(places[0]), int(parities[0]))
            if one and w.block.races:
                completed = w.block.mbarrier(int(places[0])).sync.completed
                w.block.races.acquire(w.number, completed)
            w.views[PRED][flag][...] = one
            w.yielded |= not one
            return
        asked = {(int(places[lane]), int(parities[lane])) for lane in w.lanes(m)}
        passed = {pair: w.block.passed(*pair) for pair in asked}
        for lane in w.lanes(m):
            pair = int(places[lane]), int(parities[lane])
            w.views[PRED][flag][lane] = passed[pair]
            if passed[pair] and w.block.races:
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
        if rest in (
            ["shared::cta", "global", "mbarrier::complete_tx::bytes"],
            ["shared::cluster", "global", "mbarrier::complete_tx::bytes"],
        ):
            return _load_tile(d, i)
        if rest == ["global", "shared::cta", "bulk_group"]:
            return _store_tile(d, i)
    rest = [m for m in words[2:] if m != "L2::cache_hint"]
    if rest == ["shared::cta", "global", "mbarrier::complete_tx::bytes"]:
        return _load_bytes(d, i)
    raise d.unknown(i)


def _load_bytes(d: Decoder, i: Instruction) -> Step:
    """``cp.async.bulk``: bytes from global to shared memory, which count for the mbarrier.

    The addresses and the size are multiples of 16.
    """
    to, source = d.address(i, i.operands[0]), d.address(i, i.operands[1], 64)
    size, barrier = d.source(i, i.operands[2], _WORD), d.address(i, i.operands[3])
    line = i.line

    def start(w: Warp, lane: int) -> None:
        block, count = w.block, int(w.views[U32][size][lane])
        place, origin, signal = int(to(w)[lane]), int(source(w)[lane]), int(barrier(w)[lane])
        first = place - SHARED_BASE
        if count % 16 or place % 16 or origin % 16:
            raise Fault(f"a copy of {count} bytes from {origin:#x} to offset {first}: not by 16")
        _check_fits(f"a copy of {count} bytes to", first, count, block)
        region = block.state.memory.find(origin, origin + count)
        at = origin - region.address

        def write(copy: Copy | None) -> None:
            if block.races and copy:
                block.races.copy_global(copy, region, np.array([at]), count, write=False)
            block.shared.bytes[first : first + count] = region.data[at : at + count]

        _load_bulk(w, lane, place, signal, count, write, line)

    return _each_lane(start)


def _check_fits(words: str, first: int, size: int, block: Block) -> None:
    total = block.shared.size
    if first < 0 or first + size > total:
        raise Fault(f"{words} offset {first} of {total} bytes")


def _load_bulk(
    w: Warp,
    lane: int,
    place: int,
    signal: int,
    size: int,
    write: Callable[[Copy | None], None],
    line: int,
) -> None:
    """Issue a copy to shared memory whose bytes count for an mbarrier when it happens."""
    block = w.block
    block.mbarrier(signal)
    races = block.races
    copy = races.issue(w.number, np.array([lane]), (place, signal), line) if races else None
    if races and copy:
        races.signals(copy, signal)

    def act() -> None:
        write(copy)
        clocks = None
        if races and copy:
            races.copy_writes(copy, races.shared.span(place - SHARED_BASE, size))
            clocks = races.finish(copy)
        block.transferred(signal, size, clocks)

    block.issue(Operation("load", act, line, copy=copy))


def _tensor(d: Decoder, i: Instruction, operand: Operand) -> tuple[Any, list[int]]:
    """Descriptor's address and coordinates of ``[tensor, {coordinates}]``."""
    if not isinstance(operand, Address) or not operand.coordinates:
        raise d.unknown(i, "a tensor's coordinates")
    rank = i.modifiers[3]
    if rank != f"{len(operand.coordinates)}d":
        raise d.unknown(i, f"{len(operand.coordinates)} coordinates")
    where = d.address(i, Address(operand.base, operand.offset), 64)
    return where, [d.source(i, one, _WORD) for one in operand.coordinates]


def _map_at(block: Block, address: int) -> TensorMap:
    """The tensor map in the parameter space at a generic address."""
    found = block.maps.get(address)
    if found is None:
        place, data = address - PARAMETERS, block.state.launch.parameters
        if not 0 <= place <= len(data) - 128 or place % 64:
            raise Fault("a tensor map that is not a parameter, or not at a multiple of 64 bytes")
        found = block.maps[address] = TensorMap.of(data[place : place + 128])
    return found


def _coordinate(values: Any, lane: int) -> int:
    return int(values.view(np.int32)[lane])


def _check_tile(tensor: TensorMap, place: int, block: Block) -> None:
    first = place - SHARED_BASE
    if place % 128:
        raise Fault(f"a tile at shared memory offset {first}, not a multiple of 128")
    _check_fits(f"a tile of {tensor.size} bytes at", first, tensor.size, block)


def _load_tile(d: Decoder, i: Instruction) -> Step:
    """Copy from a tensor to shared memory.

    All of the box's bytes count for the mbarrier, even those outside of the tensor, which are zero.
    """
    to, barrier = d.address(i, i.operands[0]), d.address(i, i.operands[2])
    where, coordinates = _tensor(d, i, i.operands[1])
    line = i.line

    def start(w: Warp, lane: int) -> None:
        block = w.block
        tensor = _map_at(block, int(where(w)[lane]))
        at = [_coordinate(w.views[U32][one], lane) for one in coordinates]
        place, signal = int(to(w)[lane]), int(barrier(w)[lane])
        _check_tile(tensor, place, block)

        def write(copy: Copy | None) -> None:
            if block.races and copy:
                reached = tensor.reached(block.state.memory, at)
                block.races.copy_global(copy, *reached, write=False)
            tensor.lay(block.shared, place, tensor.gather(block.state.memory, at))

        _load_bulk(w, lane, place, signal, tensor.size, write, line)

    return _each_lane(start)


def _store_tile(d: Decoder, i: Instruction) -> Step:
    """Copy from shared memory to a tensor, as part of the lane's open bulk group."""
    where, coordinates = _tensor(d, i, i.operands[0])
    source, line = d.address(i, i.operands[1]), i.line

    def start(w: Warp, lane: int) -> None:
        block = w.block
        tensor = _map_at(block, int(where(w)[lane]))
        at = [_coordinate(w.views[U32][one], lane) for one in coordinates]
        place = int(source(w)[lane])
        _check_tile(tensor, place, block)
        races = block.races
        copy = races.issue(w.number, np.array([lane]), (STORE, place), line) if races else None

        def act() -> None:
            if races and copy:
                races.copy_reads(copy, races.shared.span(place - SHARED_BASE, tensor.size))
                reached = tensor.reached(block.state.memory, at)
                races.copy_global(copy, *reached, write=True)
            tensor.scatter(block.state.memory, at, tensor.take(block.shared, place))

        operation = block.issue(Operation(STORE, act, line, copy=copy))
        block.groups(STORE, w.number).add(operation, lane)

    return _each_lane(start)


def _each_lane(start: Callable[[Warp, int], None]) -> Step:
    """Copies are per thread: each active lane issues one."""

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            start(w, int(lane))

    return run


#: Emitters by opcode.
ASYNC: dict[str, Emitter] = {"mbarrier": _mbarrier, "cp": _copy}
