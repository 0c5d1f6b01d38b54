"""Checks the releases and images that options of the serving commands name."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from builder.common.pypi.index import OLDEST_VLLM
from builder.errors import UsageError
from builder.images.bases.model import scheme_of
from builder.images.registry.reference import parse_reference


def release_base(release: str) -> str:
    """The base with a released vLLM.

    Raises:
        UsageError: it is not a version.
    """
    try:
        Version(release)
    except InvalidVersion:
        raise UsageError(
            f"--release {release!r} is not a version of vLLM", hint="--release 0.33.0"
        ) from None
    return f"pypi:vllm=={release}"


def refuse_old(vllm: str, subject: str, hint: str) -> None:
    """Refuse a release that no profile was tested with.

    A development version (``0.1.dev1+gabc``) may be of any age.

    Raises:
        UsageError: it is older than the oldest supported one.
    """
    version = Version(vllm)
    if not version.is_devrelease and Version(version.base_version) < OLDEST_VLLM:
        raise UsageError(
            f"recipes are for vLLM {OLDEST_VLLM} and later, and {subject} {vllm}", hint=hint
        )


def refuse_image(image: str) -> None:
    """Refuse references that a container engine cannot run.

    Raises:
        UsageError: it does not.
    """
    scheme, name = scheme_of(image)
    if scheme != "docker":
        raise UsageError(
            f"--image {image!r} is not a name that a container engine can run: push or load it "
            "first",
            hint="--image HOST/NAME:TAG",
        )
    parse_reference(name)
