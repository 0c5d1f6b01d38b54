"""All supported instructions by opcode, and which of them end a basic block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.ptx.ops_async import ASYNC
from builder.ptx.ops_convert import CONVERT
from builder.ptx.ops_data import DATA
from builder.ptx.ops_float import FLOAT
from builder.ptx.ops_integer import INTEGER
from builder.ptx.ops_matrix import MATRIX
from builder.ptx.ops_memory import MEMORY, YIELDING
from builder.ptx.ops_warp import WARP

if TYPE_CHECKING:
    from builder.ptx.decoder import Decoder, Emitter, Step
    from builder.ptx.source import Instruction


def _number(d: Decoder, i: Instruction) -> Step:
    """Select between integer and floating-point instructions of the same name by their type."""
    table = FLOAT if i.modifiers and i.modifiers[-1].startswith(("f", "bf")) else INTEGER
    if i.opcode not in table:
        raise d.unknown(i)
    return table[i.opcode](d, i)


EMITTERS: dict[str, Emitter] = {
    **dict.fromkeys((*INTEGER, *FLOAT), _number),
    **CONVERT,
    **DATA,
    **MEMORY,
    **MATRIX,
    **WARP,
    **ASYNC,
}

#: Opcodes after which a warp may have jumped or yielded.
_ENDS = {"bra", "ret", "exit", "bar", "barrier", "nanosleep", "atom", "red"}
#: Opcodes at which diverged lanes converge; ``mma`` and matrix moves need converged lanes.
_GATHERS = {"bar", "barrier", "shfl", "vote", "elect", "redux"}


def ends_block(i: Instruction) -> bool:
    """Whether a warp may stop after an instruction."""
    waits = {"try_wait", "test_wait", "wait_group"} & set(i.modifiers)
    return (
        i.opcode in _ENDS or bool(waits) or (i.opcode == "ld" and bool(YIELDING & set(i.modifiers)))
    )


def begins_block(i: Instruction) -> bool:
    """Whether a warp may have to execute an instruction again, or some of its lanes wait there."""
    return "wait_group" in i.modifiers or gathers(i)


def gathers(i: Instruction) -> bool:
    """Whether lanes wait there for the others of their warp.

    This is the meaning of ``.sync``; with ``.aligned`` all threads of a warp run the same barrier.
    """
    return i.opcode in _GATHERS and ("sync" in i.modifiers or i.opcode in ("bar", "barrier"))
