"""Copies of single elements from global to shared memory, and their groups.

PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy: cp.async, cp.async.commit_group,
cp.async.wait_group".  They belong to the generic proxy: each is a weak write of the thread that
issued it, and it is unordered until that thread has waited for its group.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.copies import Operation
from builder.ptx.decoder import U32, Decoder, Mask, Step, Target
from builder.ptx.ops_data import typed
from builder.ptx.source import Instruction, Number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builder.ptx.block import Block, Warp

_WORD = typed("b32")
#: The kind of these operations.
_ELEMENTS = "elements"
#: Bytes that one thread may copy, by cache operator.
_SIZES = {"ca": (4, 8, 16), "cg": (16,)}


def element_copy(d: Decoder, i: Instruction) -> Step:
    """``cp.async`` that is not bulk."""
    words = i.modifiers[1:]
    if words == ("commit_group",):
        return commit_group(_ELEMENTS)
    if words == ("wait_group",):
        return wait_group(_ELEMENTS, d, i)
    # prefetching into L2 changes no value; a cache policy is one more operand
    cache, *spaces = (w for w in words if not re.fullmatch(r"L2::\d+B", w))
    if cache in _SIZES and spaces in (["shared", "global"], ["shared::cta", "global"]):
        return _copy(d, i, _SIZES[cache])
    raise d.unknown(i)


def _copy(d: Decoder, i: Instruction, sizes: tuple[int, ...]) -> Step:
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
        copy = races.issue(w.number, (_ELEMENTS,), line) if races else None

        def act() -> None:
            rows = _read(block, origin, count, kept)
            if races and copy:
                races.copy_scatters(copy, offsets, count)
            elements = block.shared.elements[count]
            elements[offsets // count] = rows.view(elements.dtype).reshape(-1)

        operation = Operation(_ELEMENTS, act, line, copy=copy)
        block.groups(_ELEMENTS, w.number).add(operation, lanes)
        block.issue(operation)

    return run


def _read(block: Block, origin: Any, count: int, kept: Any) -> NDArray[np.uint8]:
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
                w.block.races.acquire(w.number, operation.clocks)
        groups.waited(m, latest)
        return None

    return run
