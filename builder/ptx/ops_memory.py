"""Loads, stores, atomics and reductions.

PTX ISA, "Data Movement and Conversion Instructions: ld, st" and "Parallel Synchronization and
Communication Instructions: atom, red".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import (
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
from builder.ptx.errors import Fault
from builder.ptx.formats import from_bf16, to_bf16
from builder.ptx.ops_data import load_parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.block import Warp
    from builder.ptx.source import Instruction

_VIEW_OF = {16: U16, 32: U32, 64: U64}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
#: Modifiers of loads and stores that change no value here: caching, order and scope.  Those of
#: ``YIELDING`` also let other warps run: a loop on them waits for another thread.
YIELDING = {"acquire", "relaxed", "volatile"}
_ORDER = {"weak", "release", "cta", "gpu", "sys", "cluster", *YIELDING}
_CACHING = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"}


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
    if shared:
        d.shared_sizes.add(kind.bytes)
    yields = bool(YIELDING & set(i.modifiers))

    def run(w: Warp, m: Mask) -> None:
        w.yielded |= yields
        at = address(w) if m is True else address(w)[m]
        if shared:
            found = w.block.shared.load(at, size, w.number, line)
        elif local:
            rows, places = _local(w, m, at, size)
            found = w.local[rows, places]
        else:
            found = w.block.state.memory.load(at.astype(np.int64), size)
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
    if shared:
        d.shared_sizes.add(kind.bytes)

    def run(w: Warp, m: Mask) -> None:
        at = address(w) if m is True else address(w)[m]
        rows = np.empty((len(at), len(sources)), wanted)
        for number, (view, index) in enumerate(sources):
            value = w.views[view][index]
            rows[:, number] = (value if m is True else value[m]).astype(wanted)
        data = rows.view(np.uint8).reshape(len(at), size)
        if shared:
            w.block.shared.store(at, data, w.number, line)
        elif local:
            w.local[_local(w, m, at, size)] = data
        else:
            w.block.state.memory.store(at.astype(np.int64), data)
            w.block.state.events += 1

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

    def run(w: Warp, m: Mask) -> None:
        w.yielded = True
        lanes = w.lanes(m)
        at = address(w)[lanes].astype(np.int64)
        rows = [[w.views[view][one] for one in each] for each in values]
        for which, offsets, data in w.block.state.memory.groups(at, size * count, write=True):
            for lane, offset in zip(lanes[which], offsets, strict=True):
                cells = data[offset : offset + size * count].view(f"u{size}")
                before = int(cells[0])
                for number, row in enumerate(rows):
                    old, given = int(cells[number]), [int(one[lane]) for one in row]
                    cells[number] = new = function(old, given[0], given[-1]) & wraps
                    w.block.state.events += new != old
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

    def run(w: Warp, m: Mask) -> Target:
        at = address(w)[w.lanes(m)].astype(np.int64)
        if len({*at.tolist()}) < len(at):
            return by_lane(w, m)
        w.yielded = True
        given, size = w.files[U32][values].T[w.lanes(m)], 4 * len(values)
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
