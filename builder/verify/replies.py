"""Parses the JSON replies of probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import field

from builder.errors import SparkBuildError
from builder.runtime.dispatch_expect import Answer, Failure
from builder.util.documents import Part, read

T = TypeVar("T", bound=Part)


def reply_of(answer: object, form: type[T]) -> T:
    """What a probe replied.

    Raises:
        SparkBuildError: the target's code wrote something else.
    """
    try:
        return read(answer, form)
    except ValueError as error:
        raise SparkBuildError(f"the probe's answer is malformed: {error}") from None


class DispatchReply(Part, frozen=True, kw_only=True):
    """What vLLM answered to the dispatch probe's questions."""

    #: in the order of the request's ``ask``
    answers: tuple[Answer, ...] = ()
    #: one for each choice that the release offers, of the kinds in the request's ``choices``
    choices: tuple[Answer, ...] = ()
    #: parts that replaced real ones
    simulated: tuple[str, ...] = ()
    #: vLLM's extension modules that were really loaded
    real: tuple[str, ...] = ()
    #: why nothing could be asked
    fatal: Failure | None = None


class CompiledFile(Part, frozen=True, kw_only=True):
    """What the compiler wrote."""

    #: ``ptx`` or ``cubin``
    kind: str
    size: int = 0
    sha256: str = ""
    #: of a cubin
    data: bytes = field(default=b"", name="base64")


class KernelReply(Part, frozen=True, kw_only=True):
    """What came of one kernel, or of a kernel for each tile."""

    compiled: bool = False
    request: dict[str, Any] = {}  # noqa: RUF012
    #: None where it compiled
    error: Failure | None = None
    #: ``.target`` and ``.version`` of its PTX
    target: str | None = None
    ptx_version: str | None = None
    files: tuple[CompiledFile, ...] = ()
    #: in the place of every tile
    each: tuple[KernelReply, ...] = ()

    @property
    def cubin(self) -> CompiledFile | None:
        """The machine code, if it compiled."""
        files = self.files if self.compiled else ()
        return next((file for file in files if file.kind == "cubin"), None)


class CodegenReply(Part, frozen=True, kw_only=True):
    """What the codegen probe says of each kernel of its request."""

    kernels: tuple[KernelReply, ...] = ()
    #: installed versions of what compiles
    versions: Mapping[str, str | None] = {}
    simulated: tuple[str, ...] = ()
    #: why nothing could be compiled
    fatal: Failure | None = None
    #: an earlier run's
    kept: bool = False


class LaunchFailure(Part, frozen=True, kw_only=True):
    """Why a kernel was not launched."""

    type: str
    message: str
    stage: str

    def __str__(self) -> str:
        """Both in one line."""
        return f"{self.type}: {self.message}"


class RecordedCall(Part, frozen=True, kw_only=True):
    """The launches of one call: a folder for each, in order."""

    folders: tuple[str, ...]


class RecordedKernel(Part, frozen=True, kw_only=True):
    """The calls that launched a kernel, or why there are none."""

    error: LaunchFailure | None = None
    launches: tuple[RecordedCall, ...] = ()


class LaunchReply(Part, frozen=True, kw_only=True):
    """What the launch probe wrote into files, a kernel of its request each."""

    kernels: tuple[RecordedKernel, ...] = ()
    versions: Mapping[str, str | None]
    simulated: tuple[str, ...]
    #: why nothing could be launched
    fatal: LaunchFailure | None = None
