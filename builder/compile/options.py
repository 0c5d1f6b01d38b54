"""The options of ``compile`` as frozen values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from builder.common import options as opt
from builder.common.options import Option

Platform = Annotated[
    str | None,
    Option(
        "linux/arm64 or linux/amd64 (default: this machine's).",
        "PLATFORM",
        complete=("linux/arm64", "linux/amd64"),
    ),
]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The sources of a release, and the architectures of their build."""

    vllm: Annotated[str, Option("Release, or VERSION.devN+gCOMMIT.", "VERSION")]
    source: Annotated[
        Path | None, Option("Use this source tree instead of the released one.", "DIR")
    ] = None
    arch_list: Annotated[str, Option("TORCH_CUDA_ARCH_LIST of the build.", "ARCH[;ARCH...]")] = (
        "12.1a"
    )


@dataclass(frozen=True, kw_only=True)
class ShowOptions(SourceOptions):
    """What to show of a build."""

    cuda: Annotated[str, Option("CUDA version of the build.", "VERSION")] = "13.0"
    changed: Annotated[
        tuple[str, ...], Option("A changed source file; may be repeated.", "FILE")
    ] = ()
    operators: Annotated[bool, Option("Show which torch operators each unit implements.")] = False
    json: opt.Json = False


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(SourceOptions):
    """What to compile, with which compiler."""

    change: Annotated[
        str | None,
        Option("A built-in change: sm120-family.", "NAME", complete=("sm120-family",)),
    ] = None
    patch: Annotated[Path | None, Option("A unified diff against the source tree.", "FILE")] = None
    nvcc: Annotated[
        str | None,
        Option(
            "The nvcc to use (default: the installed one, else the one from released wheels).",
            "PATH|wheels",
        ),
    ] = None
    toolkit: opt.Toolkit = None
    builder: opt.Builder = ""
    platform: Platform = None
    jobs: Annotated[
        int | None, Option("Units compiled in parallel (default: by memory).", "N", "-j", least=1)
    ] = None
    dry_run: Annotated[
        bool, Option("Show the units, the time and the memory needed.", names="-n")
    ] = False
    json: opt.Json = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(ChangeOptions):
    """What ``compile run`` compiles."""

    unit: Annotated[
        tuple[str, ...], Option("A unit to compile unchanged; may be repeated.", "FILE")
    ] = ()
    torch: Annotated[
        Path | None,
        Option("site-packages with torch (default: the version that vLLM pins).", "DIR"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WheelOptions(ChangeOptions):
    """The wheel to make, and the base that it is for."""

    base: Annotated[
        str | None, Option("The base that the wheel is for (default: the released wheels).", "BASE")
    ] = None
    cuda: Annotated[
        str | None, Option("The CUDA version that nvcc must have (default: any).", "VERSION")
    ] = None
    torch: Annotated[
        Path | None, Option("site-packages with torch's headers (default: the base's).", "DIR")
    ] = None
    output: Annotated[Path, Option("Output folder for the wheel.", "DIR", "-o")] = Path("dist")
