"""How SM121 runs the kernels of one installed extension module, read from its machine code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.compiled import KernelCode
from builder.applier.machinecode import ABSENT, NO_CODE, RUNS, TRAP, UNLOADABLE
from builder.errors import EngineError
from builder.machinecode.kernels import load_kernels
from builder.machinecode.modules import Modules
from builder.machinecode.sass import ToolMissing

if TYPE_CHECKING:
    from builder.applier.opkinds import Kernels
    from builder.applier.trees import Tree


def read_module(tree: Tree, path: str, wanted: Kernels, digest: str = "") -> KernelCode:
    """The facts of a module, from its instructions; cached by the module's sha256.

    Args:
        tree: the module's tree; from a wheel on the index only the module is read.
        path: the module.
        wanted: the ``code`` of a rendered ``compile`` op.
        digest: the module's sha256, if it is known without reading the module.

    Raises:
        EngineError: ``cuobjdump`` or ``nvdisasm`` is missing.
        BadBinary: the module's device code cannot be listed.
        RemoteError: the wheel cannot be read.
    """
    modules = Modules(tree, [wanted.symbol], {path: digest} if digest else {})
    try:
        summary = modules.summary(path)
    except ToolMissing as error:
        raise EngineError(
            f"{path} of this base is unknown, and its architectures cannot be read: {error}",
            hint=error.hint,
        ) from error
    readings = summary.readings[wanted.symbol]
    if not readings:
        return KernelCode(ABSENT if summary.elf or summary.ptx else NO_CODE)
    kernel = next(k for k in load_kernels() if k.name == wanted.name)
    if any(reading.how == "none" for reading in readings):
        how = UNLOADABLE
    elif not all(map(kernel.is_real, readings)):
        how = TRAP
    else:
        how = RUNS
    archs = {arch for reading in readings for arch in reading.arch.split()}
    guards = {g for g in wanted.guards if any(g in reading.kernel for reading in readings)}
    return KernelCode(how, " ".join(sorted(archs)), " ".join(sorted(guards)))
