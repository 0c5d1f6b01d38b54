"""Identifies a base of any kind, importing only what that kind needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from builder.common.hints import in_place_of, instead, words
from builder.common.reference import NEWEST_VLLM
from builder.errors import RemoteError
from builder.images.registry.reference import refuse_wrong_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.common.reference import Ref
    from builder.images.subject import BaseRequest, Subject


def identify(request: BaseRequest) -> Subject:
    """Identify a base without changing it.

    Raises:
        UsageError: the reference is malformed or names something that does not exist.
        RemoteError: the package index or the registry does not respond.
        EngineError: a Docker Engine is required and none responds.
    """
    refuse_wrong_kind(request.ref)
    return IDENTIFIERS[request.ref.scheme](request, request.ref.place)


def _pypi(request: BaseRequest, rest: str) -> Subject:
    from builder.images.bases.pypi import identify_pypi

    return identify_pypi(request, rest)


def _directory(request: BaseRequest, rest: str) -> Subject:
    from builder.images.bases.directory import identify_dir

    return identify_dir(request, rest)


def _layout(request: BaseRequest, _rest: str) -> Subject:
    from builder.images.bases.image import identify_remote

    return identify_remote(request, request.ref.text)


def _image(request: BaseRequest, rest: str) -> Subject:
    if asks_engine(request.ref, in_engine=request.in_engine):
        from builder.images.bases.image import identify_image

        return identify_image(request, rest)
    from builder.images.bases.image import identify_remote

    try:
        return identify_remote(request, rest)
    except RemoteError as error:
        if request.ref.in_registry or request.in_engine is False:
            raise  # no Docker Engine was meant
        from builder.images.engines.docker import without_engine

        raise without_engine(rest, error, wheels_instead(rest)) from None


def wheels_instead(ref: str) -> str:
    """The user's command with released wheels as the base, which need no engine and no registry.

    Empty if the reference does not tell the release: a patched image is not its wheels.
    """
    official = re.search(r"\bvllm/vllm-openai(?::v(\d+\.\d+\.\d+)(?![\w.]))?", ref)
    if official is None:
        return ""
    release = official[1] or NEWEST_VLLM
    if any(word.partition("=")[0] == "--image" for word in words()):
        return in_place_of("--image", ref, "--release", release)
    wheels = f"pypi:vllm=={release}"
    better = instead(ref, wheels)
    return better if better != wheels else ""


#: Identifiers of bases by the scheme of the reference.
IDENTIFIERS: dict[str, Callable[[BaseRequest, str], Subject]] = {
    "pypi": _pypi,
    "dir": _directory,
    "docker": _image,
    "oci": _layout,
}


def asks_engine(ref: Ref, *, in_engine: bool | None = None) -> bool:
    """Whether an image is looked up in a Docker Engine; ``docker://`` means its registry."""
    if in_engine is not None:
        return in_engine
    if ref.in_registry:
        return False
    from builder.images.engines import docker

    return docker.answers()
