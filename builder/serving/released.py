"""The base of a released vLLM, by its version."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from builder.errors import UsageError


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
