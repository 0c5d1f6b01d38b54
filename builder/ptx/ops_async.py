"""Mbarriers, and copies of the asynchronous proxy.

PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier" and "Data Movement and
Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.constants import PARAMETERS, SHARED_BASE
from builder.ptx.copies import Operation
from builder.ptx.decoder import PRED, U32, U64, Decoder, Emitter, Mask, Step
from builder.ptx.errors import Fault
from builder.ptx.ops_copy import commit_group, element_copy, wait_group
from builder.ptx.ops_data import typed
from builder.ptx.source import Address, Instruction, Name, Operand
from builder.ptx.tensormap import TensorMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.block import Block, Warp

_WORD, _FLAG = typed("b32"), typed("pred")
#: The kind of tensor stores, which are in bulk groups.
_STORE = "store"
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
                w.block.races.initialised(w.number, at, i.line)

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
        races = w.block.races
        clocks = races.clocks[w.number] if races else None
        for lane in w.lanes(m):
            at, number = int(address(w)[lane]), int(w.views[U32][given][lane])
            if expects:
                w.block.expect(at, number)
            if state >= 0:
                w.views[U64][state][lane] = w.block.mbarrier(at).phase
            if arrives:
                w.block.arrive(at, 1 if expects else number, clocks)
        if races:
            races.tick(w.number)

    return run


def _wait(d: Decoder, i: Instruction) -> Step:
    """``try_wait.parity``: may wait, and returns whether the phase of that parity is complete."""
    flag = d.out(i, i.operands[0], _FLAG)
    address, parity = d.address(i, i.operands[1]), d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        places, parities = address(w), w.views[U32][parity]
        if m is True and not np.count_nonzero((places != places[0]) | (parities != parities[0])):
            one = w.block.passed(w, int(places[0]), int(parities[0]))
            w.views[PRED][flag][...] = one
            w.yielded |= not one
            return
        asked = {(int(places[lane]), int(parities[lane])) for lane in w.lanes(m)}
        passed = {pair: w.block.passed(w, *pair) for pair in asked}
        for lane in w.lanes(m):
            pair = int(places[lane]), int(parities[lane])
            w.views[PRED][flag][lane] = passed[pair]
        w.yielded |= not all(passed.values())

    return run


# --------------------------------------------------------------------------------- tensor copies


def _copy(d: Decoder, i: Instruction) -> Step:
    """``cp.async.bulk``: bytes and tiles of tensors, between global and shared memory; groups."""
    words = i.modifiers
    if words[:2] != ("async", "bulk"):
        return element_copy(d, i)
    if words[2:] == ("commit_group",):
        return commit_group(_STORE)
    if words[2:3] == ("wait_group",) and set(words[3:]) <= {"read"}:
        return wait_group(_STORE, d, i)
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

        def write() -> None:
            block.shared.bytes[first : first + count] = region.data[at : at + count]

        _load(w, place, signal, count, write, line)

    return _each_lane(start)


def _check_fits(words: str, first: int, size: int, block: Block) -> None:
    total = block.shared.size
    if first < 0 or first + size > total:
        raise Fault(f"{words} offset {first} of {total} bytes")


def _load(
    w: Warp, place: int, signal: int, size: int, write: Callable[[], None], line: int
) -> None:
    """Issue a copy to shared memory whose bytes count for an mbarrier when it happens."""
    block = w.block
    block.mbarrier(signal)
    races = block.races
    copy = races.issue(w.number, (place, signal), line) if races else None
    if races and copy:
        races.signals(copy, signal)

    def act() -> None:
        write()
        clocks = None
        if races and copy:
            races.copy_writes(copy, place - SHARED_BASE, size)
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


def _signed(values: Any, lane: int) -> int:
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
        at = [_signed(w.views[U32][one], lane) for one in coordinates]
        place, signal = int(to(w)[lane]), int(barrier(w)[lane])
        _check_tile(tensor, place, block)

        def write() -> None:
            tensor.lay(block.shared, place, tensor.gather(block.state.memory, at))

        _load(w, place, signal, tensor.size, write, line)

    return _each_lane(start)


def _store_tile(d: Decoder, i: Instruction) -> Step:
    """Copy from shared memory to a tensor, as part of the lane's open bulk group."""
    where, coordinates = _tensor(d, i, i.operands[0])
    source, line = d.address(i, i.operands[1]), i.line

    def start(w: Warp, lane: int) -> None:
        block = w.block
        tensor = _map_at(block, int(where(w)[lane]))
        at = [_signed(w.views[U32][one], lane) for one in coordinates]
        place = int(source(w)[lane])
        _check_tile(tensor, place, block)
        races = block.races
        copy = races.issue(w.number, (_STORE, place), line) if races else None

        def act() -> None:
            if races and copy:
                races.copy_reads(copy, place - SHARED_BASE, tensor.size)
            tensor.scatter(block.state.memory, at, tensor.take(block.shared, place))

        operation = block.issue(Operation(_STORE, act, line, copy=copy))
        block.groups(_STORE, w.number).add(operation, lane)

    return _each_lane(start)


def _each_lane(start: Callable[[Warp, int], None]) -> Step:
    """Copies are per thread: each active lane issues one."""

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            start(w, int(lane))

    return run


#: Emitters by opcode.
ASYNC: dict[str, Emitter] = {"mbarrier": _mbarrier, "cp": _copy}
