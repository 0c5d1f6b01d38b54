"""Identify a base: ``pypi:``, ``dir:``, or an image reference.  I/O happens here and not later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.index import PackageIndex
    from builder.model import BaseIdentity
    from builder.runtime.spark_apply import Tree

#: Distributions that layers look at; what user layers name is added to it.
TRACKED = (
    "vllm",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)


@dataclass(frozen=True, kw_only=True)
class BaseRequest:
    """How to identify a base: what the command line and the profile say."""

    ref: str
    platform: str | None = None
    python: str | None = None
    site_packages: str | None = None
    pins: Mapping[str, str]
    tracked: tuple[str, ...] = TRACKED
    index: PackageIndex


@dataclass(frozen=True)
class Base:
    """An identified base, its files, and what to do when they are no longer needed."""

    identity: BaseIdentity
    tree: Tree
    close: Callable[[], None] = lambda: None


SCHEMES = ("pypi", "dir", "docker", "oci")


def scheme_of(ref: str) -> tuple[str, str]:
    """Split a base reference into scheme and rest; an image reference needs no scheme.

    Raises:
        UsageError: the scheme is unknown.
    """
    if ref.startswith("docker://"):
        return "docker", ref.removeprefix("docker://")
    scheme, colon, rest = ref.partition(":")
    if colon and scheme in SCHEMES:
        return scheme, rest
    if colon and "/" not in scheme and "." not in scheme and "==" in rest:
        raise UsageError(f"unknown kind of base {scheme!r}{did_you_mean(scheme, SCHEMES)}")
    return "docker", ref


def identify(request: BaseRequest) -> Base:
    """Find out what the base is, without changing it.

    Raises:
        UsageError: the reference is malformed or names something that does not exist.
        RemoteError: the package index does not answer.
        EngineError: an image was named and no Docker Engine answers.
    """
    scheme, rest = scheme_of(request.ref)
    if scheme == "pypi":
        from builder.bases.pypi import identify_pypi

        return identify_pypi(request, rest)
    if scheme == "dir":
        from builder.bases.directory import identify_dir

        return identify_dir(request, rest)
    if scheme == "docker":
        from builder.bases.image import identify_image

        return identify_image(request, rest)
    raise UsageError(
        f"{request.ref}: an OCI layout can be verified, but not yet be a base",
        hint="name the image in a registry, or pypi:vllm==VERSION",
    )
