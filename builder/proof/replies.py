"""The requests and replies of probes, as typed values of their JSON, and the cache of results."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

from msgspec import field
from msgspec.structs import replace

from builder.common.document import Part, read
from builder.errors import SparkBuildError
from builder.probes.dispatch_expect import Answer, Failure

T = TypeVar("T", bound=Part)


#: The most characters of an error of this machine that are shown.
_LONGEST = 300
#: Seconds for a codegen probe: one MoE kernel of the slowest DSL takes 20 s of one core.
CODEGEN_TIMEOUT = 600.0


class MalformedReply(SparkBuildError):
    """A probe ran, but its output is not a reply."""


def reply_of(answer: object, form: type[T]) -> T:
    """Parse a probe's reply.

    Raises:
        MalformedReply: the reply is malformed.
    """
    try:
        return read(answer, form)
    except ValueError as error:
        raise MalformedReply(f"the probe's answer is malformed: {error}") from None


class ProbeReply(Part, frozen=True, kw_only=True):
    """The common fields of replies."""

    #: simulated parts
    simulated: tuple[str, ...] = ()

    def simulating(self, *parts: str) -> Self:
        """The same, with more simulated parts in front."""
        return replace(self, simulated=(*parts, *self.simulated))


class Ask(Part, frozen=True, kw_only=True):
    """A query: which kernel is selected for a kind of layer, with these settings."""

    kind: str
    linear_backend: str | None = None
    moe_backend: str | None = None
    #: environment variables of this query; None means unset
    env: dict[str, None] | None = None


class LocalFiles(Part, frozen=True, kw_only=True):
    """The local files in a request."""

    #: folders that Python imports from
    paths: tuple[str, ...] = ()
    #: folders with the configuration of a model
    models: tuple[str, ...] = ()
    #: extension modules by their names in vLLM
    extensions: dict[str, str] = {}  # noqa: RUF012
    libraries: tuple[str, ...] = ()


class DispatchRequest(Part, frozen=True, kw_only=True):
    """A request to the dispatch probe."""

    env: dict[str, str | None] = {}  # noqa: RUF012
    ask: tuple[Ask, ...] = ()
    #: kinds of layer for which to query every choice
    choices: tuple[str, ...] = ()


class KernelRequest(Part, frozen=True, kw_only=True):
    """A kernel to compile."""

    kind: str
    tokens: int | None = None
    tile: tuple[int, int] | None = None
    swap_ab: bool = False


class CodegenRequest(Part, frozen=True, kw_only=True):
    """A request to the codegen probe."""

    env: dict[str, str | None]
    arch: str
    #: parallel compilations
    jobs: int
    kernels: tuple[KernelRequest, ...]


class DispatchReply(ProbeReply, frozen=True, kw_only=True):
    """The reply of the dispatch probe."""

    #: in the order of the request's ``ask``
    answers: tuple[Answer, ...] = ()
    #: one for each choice that the release offers, of the kinds in the request's ``choices``
    choices: tuple[Answer, ...] = ()
    #: vLLM's extension modules that were really loaded
    real: tuple[str, ...] = ()
    #: why no query was possible
    fatal: Failure | None = None
    #: an earlier run's
    kept: bool = False


class CompiledFile(Part, frozen=True, kw_only=True):
    """An output file of the compiler."""

    #: ``ptx`` or ``cubin``
    kind: str
    size: int = 0
    sha256: str = ""
    #: of a cubin
    data: bytes = field(default=b"", name="base64")


class KernelReply(Part, frozen=True, kw_only=True):
    """The result for one kernel, or for a kernel of each tile."""

    compiled: bool = False
    request: KernelRequest | None = None
    #: None if it compiled
    error: Failure | None = None
    #: ``.target`` and ``.version`` of its PTX
    target: str | None = None
    ptx_version: str | None = None
    files: tuple[CompiledFile, ...] = ()
    #: for each tile
    each: tuple[KernelReply, ...] = ()

    @property
    def cubin(self) -> CompiledFile | None:
        """The machine code, if it compiled."""
        files = self.files if self.compiled else ()
        return next((file for file in files if file.kind == "cubin"), None)


class CodegenReply(ProbeReply, frozen=True, kw_only=True):
    """The reply of the codegen probe."""

    kernels: tuple[KernelReply, ...] = ()
    #: installed versions of the compiler packages
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
    """The reply of the launch probe, which wrote the launches into files."""

    kernels: tuple[RecordedKernel, ...] = ()
    versions: Mapping[str, str | None]
    #: why nothing could be launched
    fatal: LaunchFailure | None = None


# ---------------------------------------------------------------------------------- cached results


#: Errors whose cause may be this machine, so that another try may have another result.
OF_THE_MACHINE = ("Crashed", "MemoryError", "OSError")
_ERRNO = "|".join(
    str(number)
    for number in (
        errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.ENOSPC,
        errno.EROFS, errno.ESTALE, errno.EDQUOT,
    )
)  # fmt: skip
#: Errors that say nothing about the target: a full disk, too little memory, a damaged file here.
_MACHINE = re.compile(
    rf"^(\w*MemoryError|OutOfMemoryError)\b|\[Errno ({_ERRNO})\]|^EOFError: marshal data too short"
    r"|No space left on device|Disk quota exceeded|[Cc]annot allocate memory|Too many open files"
    r"|can't start new thread|Input/output error"
)
#: A signal that Linux sends to a process where memory runs out.
_KILLED = "signal 9"


class ErrorOfProbe(Protocol):
    """An error in the reply of any probe."""

    @property
    def type(self) -> str: ...
    @property
    def message(self) -> str: ...


def machine_cause(error: ErrorOfProbe | None) -> str:
    """What happened on this machine, if an error says nothing about the target; else empty."""
    if error is None:
        return ""
    text = f"{error.type}: {error.message}".strip(": ")
    if error.type == "Crashed":
        killed = "; Linux does this where memory runs out" if _KILLED in error.message else ""
        return f"{error.message}{killed}"
    if not _MACHINE.search(text):
        return ""
    return f"on this machine: {text.splitlines()[0][:_LONGEST]}"


def of_the_files(error: ErrorOfProbe | None) -> bool:
    """Whether the same files give the same error every time; None is no error."""
    return error is None or not (error.type in OF_THE_MACHINE or machine_cause(error))


def cached(from_cache: bool) -> str:
    """What the place of a check adds if its result is from the cache."""
    return ", cached from the same files" if from_cache else ""
