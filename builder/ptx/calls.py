"""Calls of functions, and the functions of the device's runtime: printf, assert, malloc, free.

PTX ISA, "Control Flow Instructions: call, ret" and "Abstracting the ABI".  The parameters of a call
are in local memory, where the frame of the called function will be (``source.FRAME``).  CUDA C++
Programming Guide, "Formatted Output" and "Dynamic Global Memory Allocation".
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.accesses import local_row, read_generic
from builder.ptx.decoder import (
    MOST_LOCAL,
    PRED,
    U16,
    U32,
    U64,
    Decoder,
    Emitter,
    Mask,
    Step,
    Target,
)
from builder.ptx.machine import EXIT, FUNCTIONS, HEAP, LANES, Fault
from builder.ptx.memory import POISON, Region
from builder.ptx.registers import typed
from builder.ptx.source import FRAME, FRAME_ALIGN, RUNTIME, Function, Instruction, Name, Number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.ptx.block import Warp

#: The most calls in each other: a stack of the largest size has as many of the smallest frames.
_DEEPEST = MOST_LOCAL // FRAME_ALIGN
#: The most bytes that ``malloc`` gives, and what each of its blocks counts besides its own.
_HEAP_BYTES, _EACH = 2**30, 1024
#: The most characters that ``printf`` writes, as the device's buffer has them by default.
_MOST_WRITTEN = 2**20
#: The most characters of one conversion.
_WIDEST = 4096
_FILES = {16: U16, 32: U32, 64: U64, 1: PRED}


def _call(d: Decoder, i: Instruction) -> Step:
    """``call``: of a function of the module, by its name or its address, or of the runtime."""
    target, frame = i.operands
    assert isinstance(frame, Number)
    if isinstance(target, Name) and target.text in RUNTIME:
        return _runtime(d, i, target.text, frame.value)
    functions = {FUNCTIONS + one.entry: one for one in d.kernel.functions}
    callee = d.source(i, target, typed("b64"))
    pointer, added = d.source(i, Name(FRAME), typed("b64")), frame.value
    ranges = {one.entry: _ranges(d, one) for one in functions.values() if one.recursive}
    place = next(at for at, one in enumerate(d.kernel.code) if one is i)

    def run(w: Warp, m: Mask) -> Target:
        lanes = w.lanes(m)
        addresses = w.views[U64][callee]
        targets = np.zeros(LANES, np.int64)
        for address in {*addresses[lanes].tolist()}:
            function = functions.get(address)
            if function is None:
                raise Fault(f"a call of {address:#x}, which is no function")
            mine = lanes[addresses[lanes] == address]
            targets[mine] = function.entry
            saved: Any = ranges.get(function.entry) and [
                (view, first, w.files[view][first:end].copy())
                for view, first, end in ranges[function.entry]
            ]
            w.block.grows(sum(one.nbytes for _, _, one in saved or ()))
            for lane in mine:
                w.calls[lane].append((place + 1, added, saved))
                if len(w.calls[lane]) > _DEEPEST:
                    raise Fault(f"the stack overflows: {_DEEPEST} calls in each other")
            _grow(w, int(w.views[U64][pointer][mine].max()) + added + function.stack)
        w.views[U64][pointer][lanes] += np.uint64(added)
        return _one_or_all(targets, lanes)

    return run


def _ranges(d: Decoder, function: Function) -> list[tuple[int, int, int]]:
    """The view, the first and the last register of each width that a function has."""
    indices: dict[int, list[int]] = {}
    for name in function.registers:
        slot = d.slots[name]
        indices.setdefault(_FILES[slot.width], []).append(slot.index)
    return [(view, min(some), max(some) + 1) for view, some in indices.items()]


def _grow(w: Warp, needed: int) -> None:
    size = w.local.shape[1]
    if needed > MOST_LOCAL:
        raise Fault(f"the stack overflows: {needed} bytes of local memory")
    if needed > size:
        larger = min(max(needed, 2 * size), MOST_LOCAL)
        w.block.grows(LANES * (larger - size))
        more = np.full((LANES, larger), POISON, np.uint8)
        more[:, :size] = w.local
        w.local = more


def _one_or_all(targets: Any, lanes: Any) -> Target:
    first = int(targets[lanes[0]])
    return first if (targets[lanes] == first).all() else targets


def _return(d: Decoder, i: Instruction) -> Step:
    """``ret``: to the caller; of a kernel: the thread ends."""
    if not i.has("func"):
        return lambda _w, _m: EXIT
    pointer = d.source(i, Name(FRAME), typed("b64"))

    def run(w: Warp, m: Mask) -> Target:
        lanes = w.lanes(m)
        targets = np.zeros(LANES, np.int64)
        for lane in lanes:
            targets[lane], added, saved = w.calls[lane].pop()
            w.views[U64][pointer][lane] -= np.uint64(added)
            for view, first, rows in saved or ():
                w.files[view][first : first + len(rows), lane] = rows[:, lane]
        return _one_or_all(targets, lanes)

    return run


# ------------------------------------------------------------------------------------- the runtime


def _runtime(d: Decoder, i: Instruction, name: str, frame: int) -> Step:
    acts: dict[str, Callable[[Warp, int, int], None]] = {
        "vprintf": _print,
        "__assertfail": _assert,
        "malloc": _allocate,
        "free": partial(_free, line=i.line),
    }
    act = acts[name]
    pointer = d.slots[FRAME].index

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            at = int(w.views[U64][pointer][lane]) + frame
            _grow(w, at + 64)
            act(w, int(lane), at)

    return run


def _argument(w: Warp, lane: int, at: int, size: int = 8) -> int:
    return int.from_bytes(local_row(w, lane, at, size).tobytes(), "little")


def _text(w: Warp, lane: int, address: int) -> str:
    data = bytearray()
    while (byte := int(read_generic(w, lane, address + len(data), 1)[0])) and len(data) < 4096:
        data.append(byte)
    return data.decode("utf-8", "replace")


_FORM = re.compile(r"%([-+ #0]*)(\d+|\*)?(?:\.(\d+|\*))?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGaAcsp%])")


def _print(w: Warp, lane: int, at: int) -> None:
    """``printf``: each argument at a multiple of its size of 4 or 8 bytes."""
    form, address = _text(w, lane, _argument(w, lane, at + 8)), _argument(w, lane, at + 16)
    state = w.block.state
    if state.written < _MOST_WRITTEN:
        state.printed.append("".join(_formatted(w, lane, form, address)))
        state.written += 1 + len(state.printed[-1])
    local_row(w, lane, at, 4)[...] = np.frombuffer((1).to_bytes(4, "little"), np.uint8)


def _formatted(w: Warp, lane: int, form: str, address: int) -> Iterator[str]:
    def argument(size: int) -> bytes:
        nonlocal address
        address = -(-address // size) * size
        address += size
        return bytes(read_generic(w, lane, address - size, size))

    def whole(size: int, *, signed: bool) -> int:
        return int.from_bytes(argument(size), "little", signed=signed)

    end = 0
    for match in _FORM.finditer(form):
        yield form[end : match.start()]
        end = match.end()
        flags, width, places, size, kind = match.groups()
        width = str(whole(4, signed=True)) if width == "*" else width or ""
        places = str(whole(4, signed=True)) if places == "*" else places
        if any(len(one or "") > 9 or abs(int(one or 0)) > _WIDEST for one in (width, places)):
            raise Fault(f"a printf of a number with more than {_WIDEST} characters")
        how = f"%{flags}{width}" + (f".{places}" if places is not None else "")
        if kind == "%":
            yield "%"
        elif kind in "eEfFgGaA":
            value = float(np.frombuffer(argument(8), np.float64)[0])
            yield value.hex() if kind in "aA" else f"{how}{kind}" % value
        elif kind in "sp":
            pointer = whole(8, signed=False)
            yield f"{how}s" % (_text(w, lane, pointer) if kind == "s" else hex(pointer))
        elif kind == "c":
            yield f"{how}c" % (whole(4, signed=False) & 0xFF)
        else:
            wide = 8 if size in ("ll", "l", "z", "j", "t") else 4
            yield f"{how}{kind}" % whole(wide, signed=kind in "di")
    yield form[end:]


def _assert(w: Warp, lane: int, at: int) -> None:
    """``assert`` that failed."""
    message, file, function = (_text(w, lane, _argument(w, lane, at + n)) for n in (0, 8, 24))
    line = _argument(w, lane, at + 16, 4)
    raise Fault(f"assertion {message!r} failed in {function}, {file}:{line}")


#: The name of a region that ``malloc`` gave: no array has one with blanks, and no variable.
_ALLOCATED = "memory of malloc"


def _allocate(w: Warp, lane: int, at: int) -> None:
    """``malloc``: memory that is not initialised, at a multiple of 16; 0 if there is none."""
    state, memory, size = w.block.state, w.block.state.memory, _argument(w, lane, at + 8)
    if state.allocated + size + _EACH > _HEAP_BYTES:
        local_row(w, lane, at, 8)[...] = 0
        return
    state.allocated += size + _EACH
    free = max((r.end for r in memory.regions if HEAP <= r.address < 2 * HEAP), default=HEAP)
    address = -(-free // FRAME_ALIGN) * FRAME_ALIGN + FRAME_ALIGN
    data = np.full(size, POISON, np.uint8)
    memory.regions.append(Region(address, data, name=_ALLOCATED))
    local_row(w, lane, at, 8)[...] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)


def _free(w: Warp, lane: int, at: int, *, line: int) -> None:
    """``free``: of an address that ``malloc`` gave, or of zero.

    All accesses have to be ordered before it.  What is given again at the same address is other
    memory: ``malloc`` comes after the ``free`` of what it reuses, so that no earlier access can
    race there, and what was released there is gone.  Nothing else is ordered by that, because
    ``malloc`` may as well give another address.
    """
    state, memory, address = w.block.state, w.block.state.memory, _argument(w, lane, at)
    own = (r for r in memory.regions if r.name == _ALLOCATED and HEAP <= r.address < 2 * HEAP)
    region = next((r for r in own if r.address == address), None)
    if region is not None:
        state.allocated -= len(region.data) + _EACH
        memory.regions[:] = [one for one in memory.regions if one is not region]
        if w.block.races:
            w.block.races.frees(w.number, lane, line, region)
    elif address:
        raise Fault(f"free of {address:#x}, which malloc did not give")


#: Emitters by opcode.
CALLS: dict[str, Emitter] = {"call": _call, "ret": _return}
