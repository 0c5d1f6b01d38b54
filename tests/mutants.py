"""Kernels with one thing wrong each, drawn at random, and what notices it.

A mutant is a change of one instruction of a decoded kernel: a wait, a barrier, a fence or an
arrival that is left out or moved, another address, another scale, another operand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.proof.numbers import UNWRITTEN, judged
from builder.ptx.program import Program
from builder.ptx.runs import SCHEDULES, CarriedMemory, run_once, watches
from builder.ptx.source import Address, Instruction, Kernel, Name, Number, Pair, Vector

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from builder.ptx.findings import Run
    from builder.ptx.grid import Schedule
    from builder.ptx.launchfile import LaunchFile
    from builder.ptx.source import Operand

#: Kernels by their PTX, which may have several, and their names.
Programs = Mapping[tuple[str, str], Program]
#: What can notice a mutant.
CATCHERS = ("numbers", "race", "deadlock", "fault")
#: Sources of an instruction that may change places without changing its result.
_COMMUTE = ("add", "and", "or", "xor", "mul", "min", "max", "fma", "mad")
_SYNCHRONISES = ("bar", "barrier", "fence", "mbarrier")
_ORDERS = (*_SYNCHRONISES, "membar")
_GROUPS = ("cp.async.bulk.wait_group", "cp.async.wait_group", "cp.async.commit_group")
#: What accesses memory, orders it, or goes elsewhere.
_TOUCHES = (
    *("ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "mbarrier", "bar", "barrier"),
    *("bra", "call", "ret", "exit", "brx", "membar"),
)
_JUMPS = ("bra", "ret", "exit")
#: A loop that polls has at most so many instructions.
_POLL = 4
_BITS = tuple(1 << bit for bit in range(16))


@dataclass(frozen=True)
class Mutant:
    """One change."""

    kind: str
    line: int
    said: str
    kernel: Kernel


def _nothing(kernel: Kernel, line: int) -> Instruction:
    """An instruction without any effect, in the place of one that is left out."""
    register = Name(next(name for name, kind in kernel.registers.items() if kind == "b32"))
    return Instruction("mov", ("b32",), (register, register), None, line)


def _with(kernel: Kernel, place: int, made: Instruction) -> Kernel:
    return replace(kernel, code=(*kernel.code[:place], made, *kernel.code[place + 1 :]))


def _polls(kernel: Kernel, place: int) -> bool:
    """Whether a jump goes back to a strong read just before it."""
    one = kernel.code[place]
    if one.opcode != "bra" or not one.guard or not place - _POLL <= one.target < place:
        return False
    reads = (i for i in kernel.code[one.target : place] if i.opcode == "ld")
    return any({"acquire", "relaxed", "volatile"} & {*read.modifiers} for read in reads)


def lines_run(program: Program, covered: Iterable[int]) -> set[int]:
    """The lines of the basic blocks that a run reached."""
    places = (place for start in covered for place in range(start, program.blocks[start].end))
    return {program.kernel.code[place].line for place in places}


def _is_wait(one: Instruction) -> bool:
    return one.opcode == "mbarrier" and one.modifiers[0] in ("try_wait", "test_wait")


def _dropped(kernel: Kernel, place: int, _draw: random.Random) -> Iterator[Instruction]:
    one = kernel.code[place]
    if _is_wait(one):  # it passes at once
        zero = Number(0)
        yield Instruction("setp", ("eq", "u32"), (one.operands[0], zero, zero), one.guard, one.line)
    elif one.opcode in _SYNCHRONISES or one.name.startswith(_GROUPS):
        yield _nothing(kernel, one.line)


def _readdressed(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Instruction]:
    one = kernel.code[place]
    if one.opcode == "prefetch":  # a hint
        return
    for number, operand in enumerate(one.operands):
        if (
            isinstance(operand, Address)
            and not operand.coordinates
            and one.modifiers[:1] != ("param",)
        ):
            moved = replace(
                operand, offset=operand.offset + draw.choice((8, 16, 32, 128, 1024, -16))
            )
            yield _other(one, number, moved)


def _rescaled(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Instruction]:
    one = kernel.code[place]
    if one.opcode == "mma" and one.has("block_scale"):
        others = [i for i in kernel.code if i.opcode == "mma" and i is not one]
        yield _other(_other(one, 4, one.operands[6]), 6, one.operands[4])
        for number in (4, 6):
            yield _other(one, number, draw.choice(others).operands[number])


def _factors(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Instruction]:
    """An operand or a scale of a product, from another one of the kernel.

    Of a kernel without tensor cores, an operand of ``fma``.
    """
    one = kernel.code[place]
    if one.opcode != ("mma" if any(i.opcode == "mma" for i in kernel.code) else "fma"):
        return
    others = [i for i in kernel.code if i.name == one.name and i is not one]
    for number in (1, 2, *((4, 6) if one.has("block_scale") else ())):
        values = {str(i.operands[number]): i.operands[number] for i in others}
        values.pop(str(one.operands[number]), None)
        if values:
            yield _other(one, number, draw.choice([*values.values()]))


def _waits(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Instruction]:
    """A wait that passes at once."""
    one = kernel.code[place]
    if _is_wait(one) or one.name.startswith(("cp.async.bulk.wait_group", "cp.async.wait")):
        yield from _dropped(kernel, place, draw)
    elif _polls(kernel, place):
        yield _nothing(kernel, one.line)


def _barriers(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Instruction]:
    """A barrier that is left out."""
    if kernel.code[place].opcode in ("bar", "barrier"):
        yield from _dropped(kernel, place, draw)


def _arrivals(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Instruction]:
    """An arrival, a fence or an mbarrier's initialisation that is left out."""
    one = kernel.code[place]
    if one.opcode in ("fence", "membar") or (one.opcode == "mbarrier" and not _is_wait(one)):
        yield _nothing(kernel, one.line)


def _changed(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Instruction]:
    one = kernel.code[place]
    if one.opcode in ("bra", "ld", "prefetch", "elect", *_SYNCHRONISES):
        return
    sources = range(1, len(one.operands))
    for number in sources:
        operand = one.operands[number]
        if isinstance(operand, Number) and not operand.width:
            bits = operand.value ^ draw.choice(_BITS[: max(3, operand.value.bit_length())])
            yield _other(one, number, Number(bits))
    registers = [n for n in sources if isinstance(one.operands[n], Name)]
    commutes = one.opcode in _COMMUTE or one.has("eq") or one.has("ne")
    if len(registers) > 1 and not commutes and one.opcode not in ("cp", "mma"):
        first, second = registers[:2]
        a, b = one.operands[first], one.operands[second]
        if a != b:
            yield _other(_other(one, first, b), second, a)


def _other(one: Instruction, number: int, operand: Operand) -> Instruction:
    operands = [*one.operands]
    operands[number] = operand
    return replace(one, operands=tuple(operands))


def _moved(kernel: Kernel, place: int, draw: random.Random) -> Iterator[Kernel]:
    """What synchronises, up to six instructions earlier or later, not past a branch or a label."""
    one = kernel.code[place]
    if one.opcode not in _SYNCHRONISES or _is_wait(one) or one.modifiers[0] == "init":
        return
    step, code, at = draw.choice((-1, 1)), [*kernel.code], place
    for _ in range(draw.randint(1, 6)):
        to = at + step
        border = max(at, to) in kernel.labels
        if border or not 0 <= to < len(code) or code[to].opcode in ("bra", "ret", "exit"):
            break
        code[at], code[to] = code[to], code[at]
        at = to
    if at != place:
        yield replace(kernel, code=tuple(code))


_Change = Callable[[Kernel, int, random.Random], Iterator[Instruction | Kernel]]
_CHANGES: dict[str, _Change] = {
    "dropped": _dropped,
    "moved": _moved,
    "address": _readdressed,
    "scale": _rescaled,
    "operand": _changed,
}


#: What `benchmarks.observability` counts.
OBSERVED: dict[str, _Change] = {
    "operand": _factors,
    "wait": _waits,
    "barrier": _barriers,
    "arrival or fence": _arrivals,
}


def drawn(kernel: Kernel, count: int, seed: int) -> list[Mutant]:
    """As many mutants, their kinds in turn; the same for the same seed.

    Raises:
        ValueError: the kernel has not as many.
    """
    scaled = any(i.opcode == "mma" and i.has("block_scale") for i in kernel.code)
    kinds = [kind for kind in _CHANGES if scaled or kind != "scale"]
    mutants = _drawn(kernel, {kind: _CHANGES[kind] for kind in kinds}, count, seed)
    if len(mutants) < count:
        raise ValueError(f"{kernel.name}: only {len(mutants)} of {count} mutants")
    return mutants


def drawn_of(kernel: Kernel, kind: str, count: int, seed: int) -> list[Mutant]:
    """At most so many mutants of one kind of `OBSERVED`: fewer where the kernel has no more."""
    return _drawn(kernel, {kind: OBSERVED[kind]}, count, seed)


def _drawn(
    kernel: Kernel,
    changes: dict[str, _Change],
    count: int,
    seed: int,
) -> list[Mutant]:
    draw, kinds = random.Random(seed), [*changes]
    found: list[Mutant] = []
    seen = {kernel.code}
    for _ in range(count * 1000):
        if len(found) == count:
            return found
        kind, place = kinds[len(found) % len(kinds)], draw.randrange(len(kernel.code))
        made = list(changes[kind](kernel, place, draw))
        if not made:
            continue
        one = draw.choice(made)
        mutant = _with(kernel, place, one) if isinstance(one, Instruction) else one
        if mutant.code in seen:
            continue
        seen.add(mutant.code)
        before = kernel.code[place]
        to = mutant.code.index(before) - place if kind == "moved" else 0
        said = f"moved by {to}" if to else f"now {_text(mutant.code[place])}"
        found.append(Mutant(kind, before.line, f"{_text(before)}: {said}", mutant))
    return found


def _text(one: Instruction) -> str:
    return f"{one.name} {', '.join(map(_word, one.operands))}"


def _word(operand: Operand) -> str:
    if isinstance(operand, Name):
        return operand.text
    if isinstance(operand, Number):
        return str(operand.value)
    if isinstance(operand, Address):
        return f"[{_word(operand.base)}{operand.offset:+}]"
    return "{...}"


def caught(
    mutant: Mutant, launches: Sequence[LaunchFile], known: Collection[object] = ()
) -> tuple[str, ...]:
    """What notices it, in the first launch in which anything does.

    ``known``: the keys of races that the kernel itself has.
    """
    program = Program(mutant.kernel)
    for launch in launches:
        found = set()
        for schedule in SCHEDULES:
            run = run_once(
                launch, program, schedule, watch=watches(schedule, program), as_gpus=True
            ).run
            found |= {"numbers"} if run.wrong else set()
            found |= {"race"} if any(one.key not in known for one in judged(run)) else set()
            found |= {"deadlock" if run.deadlock else "fault"} if run.fault else set()
        if found:
            return tuple(name for name in CATCHERS if name in found)
    return ()


#: A mutant in code that no launch runs: nothing is known of it, and it is counted as that.
NOT_JUDGED = "not judged"
#: Why a mutant that nothing noticed cannot have an effect in the launches that ran.
UNREAD = "nobody reads it: NaN there is not noticed either"
SAME_VALUE = "it gives the same value each time"
MISSED_BY_NOBODY = "no access comes before the same again, or before the thread ends"
AS_BEFORE = "another edge orders the same: no two accesses are without order that had one"


def reason(
    kernel: Kernel,
    mutant: Mutant,
    seen: Callable[[Kernel], str],
    disorders: Callable[[Kernel], bool],
) -> str:
    """Why a mutant that nothing noticed cannot have an effect in some launches, or nothing.

    ``seen``: what notices a kernel in them.  ``disorders``: whether a kernel has pairs of accesses
    without order (`unordered`) that the kernel itself has not.
    """
    place = _place(kernel, mutant)
    one = kernel.code[place]
    if one.opcode in _ORDERS or one.name.startswith(_GROUPS) or _polls(kernel, place):
        if mutant.kind not in ("moved", "address", "operand") and redundant(kernel, mutant.line):
            return MISSED_BY_NOBODY
        return "" if disorders(mutant.kernel) else AS_BEFORE
    both = compared(kernel, mutant)
    if both and not seen(both):
        return SAME_VALUE
    nan = poisoned(kernel, mutant.line)
    return UNREAD if nan and not seen(nan) else ""


def _place(kernel: Kernel, mutant: Mutant) -> int:
    """Where the changed instruction is in the kernel."""
    return next(p for p, one in enumerate(kernel.code) if one.line == mutant.line)


def compared(kernel: Kernel, mutant: Mutant) -> Kernel | None:
    """The kernel, which aborts where the mutant's instruction gives another value.

    None, if it gives no value, does more than that, or has its own result as its guard.
    """
    place = _place(kernel, mutant)
    one, other = kernel.code[place], mutant.kernel.code[place]
    results = _results(kernel, one)
    guards = {*replace(one, operands=(one.guard,) if one.guard else ()).names}
    if not results or guards & {*results} or one.operands[0] != other.operands[0]:
        return None
    fresh = {name: f"{name}_other" for name in results}
    kinds = {fresh[name]: kernel.registers[name] for name in results} | {_DIFFERS: "pred"}
    more = replace(kernel, registers={**kernel.registers, **kinds})
    before = replace(other, operands=(_renamed(other.operands[0], fresh), *other.operands[1:]))
    zero, differs = Number(0), Name(_DIFFERS)
    after: list[Instruction] = []
    for name in results:
        kind, values = _kind(kernel.registers[name]), (differs, Name(name), Name(fresh[name]))
        opcode, modifiers = ("xor", (kind,)) if kind == "pred" else ("setp", ("ne", kind))
        after += [
            Instruction("setp", ("ne", "b32"), (differs, zero, zero), None, one.line),
            Instruction(opcode, modifiers, values, one.guard, one.line),
            Instruction("trap", (), (), differs, one.line),
        ]
    return _around(more, place, [before], after)


#: A register of `compared`.
_DIFFERS = "%differs"
#: What is there in the place of a value that nobody may read: NaN, of each type of numbers.
_NAN = {"b16": 0x7FFF, "b32": 0x7FFF7FFF, "b64": 0x7FFF7FFF7FFF7FFF}


def _kind(register: str) -> str:
    """The type without a sign of a register: ``b32`` of ``f32``."""
    return register if register == "pred" else f"b{register.lstrip('bsuf')}"


def _results(kernel: Kernel, one: Instruction) -> list[str]:
    """The registers that an instruction writes, if it only does that."""
    if one.opcode in _TOUCHES and one.opcode not in ("ld", "ldmatrix"):
        return []
    names = replace(one, operands=one.operands[:1]).names
    results = [name for name in names if name in kernel.registers]
    known = all(_kind(kernel.registers[name]) in ("pred", *_NAN) for name in results)
    return results if known else []


def _renamed(operand: Operand, names: Mapping[str, str]) -> Operand:
    if isinstance(operand, Name):
        return Name(names.get(operand.text, operand.text))
    if isinstance(operand, Vector):
        return replace(operand, parts=tuple(_renamed(part, names) for part in operand.parts))
    if isinstance(operand, Pair):
        return Pair(_renamed(operand.first, names), _renamed(operand.second, names))
    return operand


def _around(
    kernel: Kernel, place: int, before: Sequence[Instruction], after: Sequence[Instruction]
) -> Kernel:
    """The kernel with more instructions before and after one; jumps to it run those before."""
    more = len(before) + len(after)

    def moved(at: int) -> int:
        return at + more if at > place else at

    code = [replace(one, target=moved(one.target)) for one in kernel.code]
    return replace(
        kernel,
        code=(*code[:place], *before, code[place], *after, *code[place + 1 :]),
        labels=frozenset(map(moved, kernel.labels)),
        functions=tuple(replace(one, entry=moved(one.entry)) for one in kernel.functions),
    )


def poisoned(kernel: Kernel, line: int) -> Kernel | None:
    """The kernel with one result that is NaN: where nothing notices that, nobody reads it.

    The result of a product, what a store writes, or a register; None, if there is no such thing.
    """
    place = next(p for p, one in enumerate(kernel.code) if one.line == line)
    one, nan = kernel.code[place], Number(_NAN["b32"])
    if one.has("block_scale"):
        return _with(kernel, place, _other(one, 4, Number(0xFFFFFFFF)))
    if one.opcode == "fma":
        return _with(kernel, place, _other(one, 1, Number(0x7FC00000, 32)))
    if one.opcode == "mma":
        (count,) = (len(part.parts) for part in one.operands[1:2] if isinstance(part, Vector))
        return _with(kernel, place, _other(one, 1, Vector((nan,) * count)))
    if one.opcode == "st":
        value = Number(_NAN[_kind(one.modifiers[-1])])
        given = one.operands[1]
        many = Vector((value,) * len(given.parts)) if isinstance(given, Vector) else value
        return _with(kernel, place, _other(one, 1, many))
    after = [_overwrite(kernel, name, one) for name in _results(kernel, one)]
    return _around(kernel, place, [], after) if after else None


def _overwrite(kernel: Kernel, name: str, one: Instruction) -> Instruction:
    """NaN in a register that an instruction has written, or the other truth value."""
    kind = _kind(kernel.registers[name])
    if kind == "pred":
        return Instruction("not", ("pred",), (Name(name), Name(name)), one.guard, one.line)
    return Instruction("mov", (kind,), (Name(name), Number(_NAN[kind])), one.guard, one.line)


def redundant(kernel: Kernel, line: int) -> bool:
    """Whether what is left out there is missed by nobody, whatever a launch does.

    A wait behind which its thread only waits, until it ends; a barrier or a fence on whose every
    way the same comes again before any access, but for mbarriers that are initialised; and the
    second of two barriers.
    """
    place = next(p for p, one in enumerate(kernel.code) if one.line == line)
    one, ways, seen = kernel.code[place], [place + 1], {place}
    while ways:
        at = ways.pop()
        other = kernel.code[at]
        if at in seen or (_alike(one, other) and not _is_wait(one)):
            continue
        seen.add(at)
        if _ends(one, other):
            return _is_second(kernel, place)
        ways += [other.target] if other.opcode == "bra" else []
        ways += [at + 1] if other.opcode not in _JUMPS or other.guard else []
    return True


def _alike(one: Instruction, other: Instruction) -> bool:
    return (one.name, one.operands, one.guard) == (other.name, other.operands, other.guard)


def _ends(one: Instruction, other: Instruction) -> bool:
    """Whether a later instruction may need that a thread waited, met others or fenced."""
    if _is_wait(one):
        return other.opcode in _TOUCHES and other.opcode not in _JUMPS and not _is_wait(other)
    init = other.opcode == "mbarrier" and other.modifiers[0] == "init"
    return other.opcode in _TOUCHES and other.opcode not in ("bra", "bar") and not init


def _is_second(kernel: Kernel, place: int) -> bool:
    """Whether the same barrier comes before one, without an access between the two."""
    one, at = kernel.code[place], place
    while one.opcode in ("bar", "barrier") and at and at not in kernel.labels:
        at -= 1
        other = kernel.code[at]
        if _alike(one, other):
            return True
        if other.opcode in _TOUCHES or other.guard:
            break
    return False


def known_races(calls: Sequence[Sequence[LaunchFile]], programs: Programs) -> set[object]:
    """The keys of the races that kernels have themselves."""
    runs = (run for schedule in SCHEDULES for run in _runs(calls, programs, schedule))
    return {race.key for run in runs for race in judged(run)}


def unordered(calls: Sequence[Sequence[LaunchFile]], programs: Programs) -> set[object]:
    """The keys of all pairs of accesses of calls that nothing orders, by all that the detector has.

    By the letter of the memory model where the first block goes first and where the last does, and
    as GPUs order them in a random order, where fewer pairs hide others; between lanes of a warp, at
    the end of a block, of uninitialised memory, and where both write the same value.  If a kernel
    without something has no pair more, these calls are ordered as before: their values follow from
    that order.
    """
    return {
        race.key
        for schedule in SCHEDULES
        for run in _runs(calls, programs, schedule, as_gpus=schedule.order == "random", strict=True)
        for race in run.races
    }


def noticed(
    calls: Sequence[Sequence[LaunchFile]], programs: Programs, known: Collection[object] = ()
) -> str:
    """The first thing that is wrong with some calls, beside ``known`` races; or nothing."""
    for schedule in SCHEDULES:
        for run in _runs(calls, programs, schedule):
            if word := noticed_in(run, known):
                return word
    return ""


def _runs(
    calls: Sequence[Sequence[LaunchFile]],
    programs: Programs,
    schedule: Schedule,
    *,
    as_gpus: bool = True,
    strict: bool = False,
) -> Iterator[Run]:
    """Run calls; launches of one run one after the other, on the memory that those before left."""
    for call in calls:
        memory = CarriedMemory()
        for launch in call:
            own = memory.memory_for(launch)
            program = programs[launch.ptx, launch.kernel]
            watch = strict or watches(schedule, program)
            yield run_once(
                launch, program, schedule, watch=watch, as_gpus=as_gpus, strict=strict, memory=own
            ).run
            memory.keep(launch, own)


def noticed_in(run: Run, known: Collection[object]) -> str:
    """What is wrong with a run, beside ``known`` races; or nothing."""
    if run.fault:
        return "deadlock" if run.deadlock else "fault"
    if run.wrong:
        return "numbers"
    # a tile may have rows that no token needs
    others = [race for race in judged(run) if race.kind != UNWRITTEN]
    return "race" if any(race.key not in known for race in others) else ""
