"""What probes are asked and what they reply, read out of their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeVar

from msgspec import field
from msgspec.structs import replace

from builder.errors import SparkBuildError
from builder.runtime.dispatch_expect import Answer, Failure
from builder.util.documents import Part, read

T = TypeVar("T", bound=Part)


class MalformedReply(SparkBuildError):
    """A probe ran, and the target's code wrote something else than its reply."""


def reply_of(answer: object, form: type[T]) -> T:
    """What a probe replied.

    Raises:
        MalformedReply: that is not of its form.
    """
    try:
        return read(answer, form)
    except ValueError as error:
        raise MalformedReply(f"the probe's answer is malformed: {error}") from None


class ProbeReply(Part, frozen=True, kw_only=True):
    """What all replies have."""

    #: parts that replaced real ones
    simulated: tuple[str, ...] = ()

    def simulating(self, *parts: str) -> Self:
        """The same, with more such parts before the others."""
        return replace(self, simulated=(*parts, *self.simulated))


class Ask(Part, frozen=True, kw_only=True):
    """Which kernel is selected for a kind of layer, with these settings."""

    kind: str
    linear_backend: str | None = None
    moe_backend: str | None = None
    #: variables that this one is asked with; None: unset
    env: dict[str, None] | None = None


class LocalFiles(Part, frozen=True, kw_only=True):
    """What a request names of this machine."""

    #: folders that Python imports from
    paths: tuple[str, ...] = ()
    #: extension modules by their names in vLLM
    extensions: dict[str, str] = {}  # noqa: RUF012
    libraries: tuple[str, ...] = ()


class DispatchRequest(Part, frozen=True, kw_only=True):
    """What the dispatch probe is asked."""

    env: dict[str, str | None] = {}  # noqa: RUF012
    ask: tuple[Ask, ...] = ()
    #: kinds of layer whose every choice is asked for
    choices: tuple[str, ...] = ()


class KernelRequest(Part, frozen=True, kw_only=True):
    """A kernel to compile."""

    kind: str
    tokens: int | None = None
    tile: tuple[int, int] | None = None
    swap_ab: bool = False


class CodegenRequest(Part, frozen=True, kw_only=True):
    """What the codegen probe is asked."""

    env: dict[str, str | None]
    arch: str
    #: compiled at once
    jobs: int
    kernels: tuple[KernelRequest, ...]


class DispatchReply(ProbeReply, frozen=True, kw_only=True):
    """What vLLM answered to the dispatch probe's questions."""

    #: in the order of the request's ``ask``
    answers: tuple[Answer, ...] = ()
    #: one for each choice that the release offers, of the kinds in the request's ``choices``
    choices: tuple[Answer, ...] = ()
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
    request: KernelRequest | None = None
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


class CodegenReply(ProbeReply, frozen=True, kw_only=True):
    """What the codegen probe says of each kernel of its request."""

    kernels: tuple[KernelReply, ...] = ()
    #: installed versions of what compiles
    versions: Mapping[str, str | None] = {}
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


class LaunchReply(ProbeReply, frozen=True, kw_only=True):
    """What the launch probe wrote into files, a kernel of its request each."""

    kernels: tuple[RecordedKernel, ...] = ()
    versions: Mapping[str, str | None]
    #: why nothing could be launched
    fatal: LaunchFailure | None = None
