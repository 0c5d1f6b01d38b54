"""Instructions of a whole warp: communication of its lanes, branches and barriers.

PTX ISA, "Control Flow Instructions", "Data Movement and Conversion Instructions: shfl" and
"Parallel Synchronization and Communication Instructions: bar, barrier, vote, match, redux,
activemask, elect".
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.accesses import fence_maps
from builder.ptx.block import ALL
from builder.ptx.decoder import (
    PRED,
    U32,
    Decoder,
    Emitter,
    Mask,
    Step,
    Target,
)
from builder.ptx.machine import EXIT, LANES, Fault, one_nan
from builder.ptx.races import BLOCK, CLUSTER, GRID
from builder.ptx.registers import greater, lesser, typed
from builder.ptx.source import Instruction, Name, Negated, Number, Pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.ptx.block import NamedBarrier, Warp


class Apart(Exception):
    """An instruction of a whole warp that only a part of its lanes has reached."""


def whole_warp(i: Instruction, w: Warp, m: Mask) -> None:
    """``.aligned``: all threads of the warp execute the same instruction.

    Raises:
        Apart: lanes are missing that may still come.
        Fault: no other lane can continue, or some have ended.
    """
    if m is True:
        return
    if not w.alone and w.pcs is not None and ((w.pcs < EXIT) & (w.pcs != w.pc)).any():
        raise Apart
    raise Fault(f"{i.name} by a part of a warp ({int(np.count_nonzero(m))} lanes)")


# --------------------------------------------------------------------- lanes, branches and barriers


_LANE = np.arange(LANES)
#: The mask of all lanes.
_ALL = 2**LANES - 1
_WORD, _FLAG = typed("b32"), typed("pred")
#: What a shuffle gives where its result is undefined.
_UNDEFINED = np.uint32(0xDEADBEEF)


def _members(w: Warp, m: Mask, index: int, i: Instruction) -> Any:
    """The lanes that take part, and by lane those that it names, which all have to be here.

    Lanes may name different ones: those of one name are one group.
    """
    lanes = w.lanes(m)
    row = w.views[U32][index]
    if m is True and (row == _ALL).all():
        return lanes, None
    masks = row[lanes]
    live, here = _bits(w.live), int(_BIT[lanes].sum())
    for one in {*masks.tolist()}:
        group = int(_BIT[lanes[masks == one]].sum())
        if group & ~one or one & live & ~group:
            raise Fault(f"{i.name} of lanes {one:#010x} by lanes {here:#010x}")
    return lanes, row


def _groups(lanes: Any, row: Any) -> Iterator[Any]:
    """The lanes of each group."""
    if row is None:
        yield lanes
        return
    masks = row[lanes]
    for one in {*masks.tolist()}:
        yield lanes[masks == one]


_BIT = 1 << np.arange(LANES, dtype=np.int64)


def _bits(lanes: Any) -> int:
    return int(_BIT[lanes].sum())


def ready(w: Warp, here: Any, row: Any) -> Any:
    """Those of the lanes at an instruction whose named lanes, in ``row``, are all there."""
    live = w.live
    if row is None:
        return here if not (live & ~here).any() else here & False
    bits, can = _bits(live), np.zeros(LANES, np.bool_)
    masks = np.where(here, row, 0)
    for one in {*row[here].tolist()}:
        group = here & (masks == one)
        if one & bits & ~_bits(group) == 0:
            can |= group
    return can


def _branch(_d: Decoder, i: Instruction) -> Step:
    """``bra``: a guard makes it conditional."""
    target = i.target
    return lambda _w, _m: target


def _branch_by_index(d: Decoder, i: Instruction) -> Step:
    """``brx.idx``: to the label of a list that a register selects."""
    index = d.source(i, i.operands[0], _WORD)
    places = np.array([one.value for one in i.operands[1:] if isinstance(one, Number)])

    def run(w: Warp, m: Mask) -> Target:
        chosen = np.zeros(LANES, np.int64)
        chosen[w.lanes(m)] = w.views[U32][index][w.lanes(m)]
        if chosen.max() >= len(places):
            raise Fault(f"brx.idx: entry {chosen.max()} of {len(places)}")
        return places[chosen]

    return run


def _end(_d: Decoder, _i: Instruction) -> Step:
    """``exit``: the thread ends."""
    return lambda _w, _m: EXIT


@lru_cache(maxsize=1024)
def _others(mode: str, by: bytes, control: bytes) -> tuple[Any, Any]:
    """The lane that each lane reads, and whether it exists; cached."""
    step = np.frombuffer(by, np.uint32).astype(np.int64) & 31
    controls = np.frombuffer(control, np.uint32).astype(np.int64)
    segment, clamp = controls >> 8 & 31, controls & 31
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
        values = words[a][source]
        lanes, row = _members(w, m, members, i)
        for group in _groups(lanes, row):  # the value of a lane that takes no part is undefined
            values[group[~np.isin(source[group], group)]] = _UNDEFINED
        words[out][lanes] = values[lanes]
        if flag >= 0:
            w.views[PRED][flag][lanes] = valid[lanes]

    return run


def _vote(d: Decoder, i: Instruction) -> Step:
    """``vote.sync``: whether a predicate holds in all, any, all or none; or in which lanes.

    CUDA's own headers have ``.sync`` after the mode.
    """
    words = tuple(word for word in i.modifiers if word != "sync")
    if i.modifiers.count("sync") != 1 or i.modifiers[-1] == "sync" or words not in (
        ("all", "pred"), ("any", "pred"), ("uni", "pred"), ("ballot", "b32"),
    ):  # fmt: skip
        raise d.unknown(i)
    mode, predicate = words[0], i.operands[1]
    negated = isinstance(predicate, Negated)
    a = d.source(i, predicate.name if isinstance(predicate, Negated) else predicate, _FLAG)
    out = d.out(i, i.operands[0], _WORD if mode == "ballot" else _FLAG)
    members = d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        for lanes in _groups(*_members(w, m, members, i)):
            holds = w.views[PRED][a][lanes] ^ negated
            if mode == "ballot":
                w.views[U32][out][lanes] = int((1 << lanes[holds]).sum())
                continue
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


_FLOAT_WORDS = ((), ("abs",), ("NaN",), ("abs", "NaN"))


def _reduce(d: Decoder, i: Instruction) -> Step:
    """``redux.sync``: a value combined from all named lanes, for each of them."""
    if i.modifiers[-1:] == ("f32",):
        return _reduce_floats(d, i)
    if i.modifiers[:1] != ("sync",) or i.modifiers[1:] not in _REDUCED:
        raise d.unknown(i)
    function, kind = _REDUCED[i.modifiers[1], i.modifiers[2]], d.type(i)
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)
    members = d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        row = w.views[kind.view]
        for lanes in _groups(*_members(w, m, members, i)):
            row[out][lanes] = function.reduce(row[a][lanes], dtype=row[a].dtype)

    return run


def _reduce_floats(d: Decoder, i: Instruction) -> Step:
    """``redux.sync`` of float32: the least or greatest number of the named lanes.

    A NaN counts with ``.NaN`` only, or if all are; the result is then the canonical one.
    """
    extreme = {"min": lesser, "max": greater}.get("".join(i.modifiers[1:2]))
    words = i.modifiers[2:-1]
    if i.modifiers[0] != "sync" or not extreme or words not in _FLOAT_WORDS:
        raise d.unknown(i)
    kind = d.type(i)
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)
    members = d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        row = w.views[kind.view]
        for lanes in _groups(*_members(w, m, members, i)):
            values = np.abs(row[a][lanes]) if "abs" in words else row[a][lanes]
            nan = "NaN" in words and np.isnan(values).any()
            row[out][lanes] = one_nan(np.array(np.nan if nan else reduce(extreme, values)))

    return run


def _elect(d: Decoder, i: Instruction) -> Step:
    """``elect.sync``: one of the named lanes; here the lowest."""
    to = i.operands[0]
    if i.modifiers != ("sync",) or not isinstance(to, Pair):
        raise d.unknown(i)
    out = d.out(i, to.first, _WORD) if to.first != Name("_") else -1
    flag, members = d.out(i, to.second, _FLAG), d.source(i, i.operands[1], _WORD)

    def run(w: Warp, m: Mask) -> None:
        for lanes in _groups(*_members(w, m, members, i)):
            w.views[PRED][flag][lanes] = lanes == lanes[0]
            if out >= 0:
                w.views[U32][out][lanes] = lanes[0]

    return run


def _match(d: Decoder, i: Instruction) -> Step:
    """``match.sync``: ``any``: the lanes with the same value; ``all``: all, if they have one."""
    mode, kind = i.modifiers[0], d.type(i)
    if i.modifiers[1:-1] != ("sync",) or mode not in ("any", "all") or kind.bits < 32:
        raise d.unknown(i)
    to = i.operands[0]
    out = d.out(i, to.first if isinstance(to, Pair) else to, _WORD)
    flag = d.out(i, to.second, _FLAG) if isinstance(to, Pair) else -1
    a, members = d.source(i, i.operands[1], kind), d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        values = w.views[kind.view][a]
        for group in _groups(*_members(w, m, members, i)):
            own = values[group]
            same = own[:, None] == own[None, :]
            masks = (same * _BIT[group]).sum(1)
            if mode == "all":
                masks = np.where(same.all(), masks, 0)
            w.views[U32][out][group] = masks
            if flag >= 0:
                w.views[PRED][flag][group] = same.all()

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


def _together(d: Decoder, i: Instruction) -> Step:
    members = d.source(i, i.operands[0], _WORD)

    def run(w: Warp, m: Mask) -> None:
        participants = _members(w, m, members, i)
        if w.block.races:
            for lanes in _groups(*participants):
                w.block.races.barrier([(w.number, lanes)], [(w.number, lanes)])

    return run


def _barrier(d: Decoder, i: Instruction) -> Step:
    """``barrier.sync`` and ``.red`` wait, ``.arrive`` does not; ``bar.warp.sync``: a warp's.

    ``bar`` is ``barrier.aligned``: all threads of a warp that have not ended are at the same one.
    """
    words = [m for m in i.modifiers if m not in ("cta", "aligned")]
    if words == ["warp", "sync"]:
        return _together(d, i)
    if words[:1] == ["cluster"] and i.opcode == "barrier":
        return _cluster_barrier(d, i, words[1:])
    operands, result = list(i.operands), None
    if words[:1] == ["red"]:
        result = _reduced_at(d, i, words[1:], operands.pop(0), operands.pop())
    elif words not in (["sync"], ["arrive"]):
        raise d.unknown(i)
    number = d.source(i, operands[0], _WORD)
    threads = d.source(i, operands[1], _WORD) if len(operands) > 1 else -1
    waits, aligned = words != ["arrive"], i.opcode == "bar" or i.has("aligned")

    def run(w: Warp, m: Mask) -> None:
        lanes = ALL if m is True else m
        if aligned and m is not True and (w.live & ~lanes).any():
            whole_warp(i, w, m)
        which = int(w.views[U32][number][w.lanes(m)[0]])
        if which > 15:
            raise Fault(f"barrier {which}: a block has 16")
        count = int(w.views[U32][threads][w.lanes(m)[0]]) if threads >= 0 else None
        barrier = w.block.meet(w, lanes, which, count, wait=waits)
        if result:
            result(w, lanes, barrier)
        w.block.settle(which)

    return run


def _cluster_barrier(d: Decoder, i: Instruction, words: list[str]) -> Step:
    """``barrier.cluster.arrive`` and ``.wait``: all threads of a cluster that have not ended."""
    if words not in (["arrive"], ["arrive", "release"], ["arrive", "relaxed"], ["wait"],
                     ["wait", "acquire"]):  # fmt: skip
        raise d.unknown(i)
    arrives, release, aligned = words[0] == "arrive", "relaxed" not in words, i.has("aligned")

    def run(w: Warp, m: Mask) -> None:
        lanes, races = ALL if m is True else m, w.block.races
        if aligned and m is not True and (w.live & ~lanes).any():
            whole_warp(i, w, m)
        if not arrives:
            w.block.cluster.wait(w, lanes)
            return
        clocks = None
        if races:
            clocks = races.arrives_at_cluster(w.number, w.lanes(m), release=release)
        w.block.cluster.arrive(w, lanes, clocks)

    return run


def _reduced_at(
    d: Decoder, i: Instruction, words: list[str], to: Any, predicate: Any
) -> Callable[[Warp, Any, NamedBarrier], None]:
    """``barrier.red``: the number of threads whose predicate holds, or whether all or any do."""
    if words not in (["popc", "u32"], ["and", "pred"], ["or", "pred"]):
        raise d.unknown(i)
    kind, negated = _WORD if words[0] == "popc" else _FLAG, isinstance(predicate, Negated)
    out, a = d.out(i, to, kind), d.source(i, predicate.name if negated else predicate, _FLAG)

    def arrive(w: Warp, lanes: Any, barrier: NamedBarrier) -> None:
        barrier.count += int(((w.views[PRED][a] ^ negated) & lanes).sum())

        def tell(count: int, threads: int) -> None:
            value = {"popc": count, "and": count == threads, "or": count > 0}[words[0]]
            w.views[kind.view][out][lanes] = value

        barrier.results.append(tell)

    return arrive


def _trap(_d: Decoder, i: Instruction) -> Step:
    """``trap`` and ``brkpt``: the kernel aborts, or stops where no debugger is."""

    def run(_w: Warp, _m: Mask) -> Target:
        raise Fault(f"the kernel executed {i.opcode}")

    return run


def _nothing(_d: Decoder, i: Instruction) -> Step:
    """Instructions that change no value.

    ``prefetch``, ``setmaxnreg``, ``griddepcontrol`` and ``nanosleep``.
    """
    sleeps = i.opcode == "nanosleep"

    def run(w: Warp, _m: Mask) -> None:
        w.yielded |= sleeps

    return run


def _fence_initialised(w: Warp, m: Mask) -> None:
    """``fence.mbarrier_init``."""
    if w.block.races:
        w.block.races.fence_initialised(w.number, w.lanes(m))


def _fence(d: Decoder, i: Instruction) -> Step:
    """``fence.proxy.async`` makes earlier writes visible to the asynchronous proxy."""
    if i.modifiers[:2] != ("proxy", "async"):
        if i.modifiers[:2] == ("proxy", "tensormap::generic"):
            return fence_maps(d, i)
        if i.modifiers[:1] == ("proxy",):
            raise d.unknown(i)
        return _fence_initialised if i.modifiers[:1] == ("mbarrier_init",) else _order(d, i)
    if i.modifiers[2:] not in ((), ("shared::cta",), ("global",)):
        raise d.unknown(i)
    spaces = {(): (0, 1), ("global",): (1,)}.get(i.modifiers[2:], (0,))

    def run(w: Warp, m: Mask) -> None:
        if w.block.races:
            w.block.races.fence_proxy(w.number, None if m is True else w.lanes(m), spaces)

    return run


def _order(_d: Decoder, i: Instruction) -> Step:
    """``fence.sc``, ``fence.acq_rel`` and ``membar``, which is ``fence.sc`` by its old name."""
    sc = i.opcode == "membar" or i.has("sc")
    scope = BLOCK if i.has("cta") else CLUSTER if i.has("cluster") else GRID

    def run(w: Warp, m: Mask) -> None:
        if w.block.races:
            w.block.races.fence(w.number, None if m is True else w.lanes(m), scope, sc=sc)

    return run


#: Emitters by opcode.
WARP: dict[str, Emitter] = {
    "bra": _branch,
    "brx": _branch_by_index,
    "exit": _end,
    "trap": _trap,
    "brkpt": _trap,
    "shfl": _shuffle,
    "vote": _vote,
    "elect": _elect,
    "redux": _reduce,
    "match": _match,
    "activemask": _active,
    "bar": _barrier,
    "barrier": _barrier,
    "fence": _fence,
    "membar": _order,
    **dict.fromkeys(
        (
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
