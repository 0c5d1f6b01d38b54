"""Communication between the lanes of a warp, and branches.

PTX ISA, "Control Flow Instructions", "Data Movement and Conversion Instructions: shfl" and
"Parallel Synchronization and Communication Instructions: bar, barrier, vote, redux, activemask,
elect".
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.constants import EXIT, LANES
from builder.ptx.decoder import PRED, U32, Decoder, Emitter, Mask, Step, Target
from builder.ptx.errors import Fault
from builder.ptx.ops_data import typed
from builder.ptx.ops_matrix import whole_warp
from builder.ptx.source import Instruction, Name, Negated, Pair

if TYPE_CHECKING:
    from builder.ptx.block import Warp

_LANE = np.arange(LANES)
#: The mask of all lanes.
_ALL = 2**LANES - 1
_WORD, _FLAG = typed("b32"), typed("pred")


def _members(w: Warp, m: Mask, index: int, i: Instruction) -> Any:
    """The lanes that a ``.sync`` names: exactly these must be active."""
    lanes = w.lanes(m)
    named = int(w.views[U32][index][lanes[0]])
    here = int((1 << lanes).sum())
    if named & ~here or here & ~named:
        raise Fault(f"{i.name} of lanes {named:#010x} by lanes {here:#010x}")
    return lanes


def _branch(_d: Decoder, i: Instruction) -> Step:
    """``bra``: a guard makes it conditional."""
    target = i.target
    return lambda _w, _m: target


def _end(_d: Decoder, _i: Instruction) -> Step:
    """``ret`` of a kernel, and ``exit``: the thread ends."""
    return lambda _w, _m: EXIT


@lru_cache(maxsize=1024)
def _others(mode: str, by: bytes, control: bytes) -> tuple[Any, Any]:
    """The lane that each lane reads, and whether it exists; cached."""
    step = np.frombuffer(by, np.uint32).astype(np.int64) & 31
    given = np.frombuffer(control, np.uint32).astype(np.int64)
    segment, clamp = given >> 8 & 31, given & 31
    first = _LANE & segment
    last = first | clamp & ~segment
    if mode == "idx":
        other = first | step & ~segment
    elif mode == "up":
        other = _LANE - step
    else:
        other = _LANE + step if mode == "down" else _LANE ^ step
    valid = other >= last if mode == "up" else other <= last
    return np.where(valid, other, _LANE), valid


def _shuffle(d: Decoder, i: Instruction) -> Step:
    """``shfl.sync``: the value of another lane of the segment; if there is none, the own value."""
    if len(i.modifiers) != 3 or i.modifiers[0] != "sync" or i.modifiers[2] != "b32":
        raise d.unknown(i)
    mode = i.modifiers[1]
    if mode not in ("idx", "up", "down", "bfly"):
        raise d.unknown(i)
    to = i.operands[0]
    out = d.out(i, to.first if isinstance(to, Pair) else to, _WORD)
    flag = d.out(i, to.second, _FLAG) if isinstance(to, Pair) else -1
    a, b, c, members = (d.source(i, one, _WORD) for one in i.operands[1:5])

    def run(w: Warp, m: Mask) -> None:
        words = w.views[U32]
        source, valid = _others(mode, words[b].tobytes(), words[c].tobytes())
        if m is True and words[members][0] == _ALL:
            words[out][...] = words[a][source]
            if flag >= 0:
                w.views[PRED][flag][...] = valid
            return
        lanes = _members(w, m, members, i)
        if not np.isin(source[lanes], lanes).all():
            raise Fault(f"{i.name} reads a lane that does not take part")
        words[out][lanes] = words[a][source][lanes]
        if flag >= 0:
            w.views[PRED][flag][lanes] = valid[lanes]

    return run


def _vote(d: Decoder, i: Instruction) -> Step:
    """``vote.sync``: whether a predicate holds in all, any, all or none; or in which lanes."""
    if i.modifiers[:1] != ("sync",) or i.modifiers[1:] not in (
        ("all", "pred"), ("any", "pred"), ("uni", "pred"), ("ballot", "b32"),
    ):  # fmt: skip
        raise d.unknown(i)
    mode, given = i.modifiers[1], i.operands[1]
    negated = isinstance(given, Negated)
    a = d.source(i, given.name if isinstance(given, Negated) else given, _FLAG)
    out = d.out(i, i.operands[0], _WORD if mode == "ballot" else _FLAG)
    members = d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = _members(w, m, members, i)
        holds = w.views[PRED][a][lanes] ^ negated
        if mode == "ballot":
            w.views[U32][out][lanes] = int((1 << lanes[holds]).sum())
            return
        uniform = holds.all() or not holds.any()
        value = {"all": holds.all(), "any": holds.any(), "uni": uniform}[mode]
        w.views[PRED][out][lanes] = value

    return run


#: The reductions of ``redux.sync``, by operation and type; integers wrap.
_REDUCED: dict[tuple[str, str], Any] = {
    ("add", "u32"): np.add, ("add", "s32"): np.add,
    ("min", "u32"): np.minimum, ("max", "u32"): np.maximum,
    ("min", "s32"): np.minimum, ("max", "s32"): np.maximum,
    ("and", "b32"): np.bitwise_and, ("or", "b32"): np.bitwise_or, ("xor", "b32"): np.bitwise_xor,
}  # fmt: skip


def _reduce(d: Decoder, i: Instruction) -> Step:
    """``redux.sync``: a value combined from all named lanes, for each of them."""
    if i.modifiers[:1] != ("sync",) or i.modifiers[1:] not in _REDUCED:
        raise d.unknown(i)
    function, kind = _REDUCED[i.modifiers[1], i.modifiers[2]], d.type(i)
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)
    members = d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = _members(w, m, members, i)
        row = w.views[kind.view]
        row[out][lanes] = function.reduce(row[a][lanes], dtype=row[a].dtype)

    return run


def _elect(d: Decoder, i: Instruction) -> Step:
    """``elect.sync``: one of the named lanes; here the lowest."""
    to = i.operands[0]
    if i.modifiers != ("sync",) or not isinstance(to, Pair):
        raise d.unknown(i)
    out = d.out(i, to.first, _WORD) if to.first != Name("_") else -1
    flag, members = d.out(i, to.second, _FLAG), d.source(i, i.operands[1], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = _members(w, m, members, i)
        w.views[PRED][flag][lanes] = lanes == lanes[0]
        if out >= 0:
            w.views[U32][out][lanes] = lanes[0]

    return run


def _active(d: Decoder, i: Instruction) -> Step:
    """``activemask``: the active lanes."""
    if i.modifiers != ("b32",):
        raise d.unknown(i)
    out = d.out(i, i.operands[0], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        w.views[U32][out][lanes] = int((1 << lanes).sum())

    return run


def _barrier(d: Decoder, i: Instruction) -> Step:
    """``bar.sync``, ``barrier.sync`` wait, ``bar.arrive`` does not; ``bar.warp.sync``: a warp's."""
    words = [m for m in i.modifiers if m not in ("cta", "aligned")]
    if words == ["warp", "sync"]:
        members = d.source(i, i.operands[0], _WORD)

        def together(w: Warp, m: Mask) -> None:
            _members(w, m, members, i)

        return together
    if words not in (["sync"], ["arrive"]):
        raise d.unknown(i)
    number = d.source(i, i.operands[0], _WORD)
    threads = d.source(i, i.operands[1], _WORD) if len(i.operands) > 1 else -1
    waits = words == ["sync"]

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, m)
        which = int(w.views[U32][number][0])
        if which > 15:
            raise Fault(f"barrier {which}: a block has 16")
        count = int(w.views[U32][threads][0]) if threads >= 0 else None
        w.block.meet(w, which, count, wait=waits)

    return run


def _trap(_d: Decoder, _i: Instruction) -> Step:
    """``trap``: the kernel aborts."""

    def run(_w: Warp, _m: Mask) -> Target:
        raise Fault("the kernel executed trap")

    return run


def _nothing(_d: Decoder, i: Instruction) -> Step:
    """Instructions that change no value.

    ``prefetch``, ``setmaxnreg``, ``griddepcontrol``, ``nanosleep``, and fences for global memory.
    """
    sleeps = i.opcode == "nanosleep"

    def run(w: Warp, _m: Mask) -> None:
        w.yielded |= sleeps

    return run


def _fence_initialised(w: Warp, _m: Mask) -> None:
    """``fence.mbarrier_init``."""
    if w.block.races:
        w.block.races.fence_initialised(w.number)


def _fence(d: Decoder, i: Instruction) -> Step:
    """``fence.proxy.async`` makes earlier writes visible to the asynchronous proxy."""
    if i.modifiers[:2] != ("proxy", "async"):
        if i.modifiers[:1] == ("proxy",) and i.modifiers[:2] != ("proxy", "tensormap::generic"):
            raise d.unknown(i)
        return _fence_initialised if i.modifiers[:1] == ("mbarrier_init",) else _nothing(d, i)
    if i.modifiers[2:] not in ((), ("shared::cta",), ("global",)):
        raise d.unknown(i)

    def run(w: Warp, _m: Mask) -> None:
        if w.block.races:
            w.block.races.fence(w.number)

    return run if i.modifiers[2:] != ("global",) else _nothing(d, i)


#: Emitters by opcode.
WARP: dict[str, Emitter] = {
    "bra": _branch,
    "ret": _end,
    "exit": _end,
    "trap": _trap,
    "shfl": _shuffle,
    "vote": _vote,
    "elect": _elect,
    "redux": _reduce,
    "activemask": _active,
    "bar": _barrier,
    "barrier": _barrier,
    "fence": _fence,
    **dict.fromkeys(
        (
            "membar",
            "prefetch",
            "prefetchu",
            "setmaxnreg",
            "griddepcontrol",
            "nanosleep",
            "applypriority",
        ),
        _nothing,
    ),
}
