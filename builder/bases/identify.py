"""Identifies a base of any kind, importing only what that kind needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.bases.model import scheme_of
from builder.engines.kinds import may_use_docker, named
from builder.errors import RemoteError
from builder.registry.refhints import refuse_wrong_kind

if TYPE_CHECKING:
    from builder.bases.model import Base, BaseRequest


def identify(request: BaseRequest) -> Base:
    """Find out what the base is, without changing it.

    Raises:
        UsageError: the reference is malformed or names something that does not exist.
        RemoteError: the package index or the registry does not answer.
        EngineError: a Docker Engine was asked for and none answers.
    """
    refuse_wrong_kind(request.ref)
    scheme, rest = scheme_of(request.ref)
    if scheme == "pypi":
        from builder.bases.pypi import identify_pypi

        return identify_pypi(request, rest)
    if scheme == "dir":
        from builder.bases.directory import identify_dir

        return identify_dir(request, rest)
    if scheme == "docker" and asks_engine(request.ref, request.engine):
        from builder.bases.image import identify_image

        return identify_image(request, rest)
    from builder.bases.remote import identify_remote

    try:
        return identify_remote(request, request.ref if scheme == "oci" else rest)
    except RemoteError as error:
        read_directly = scheme == "oci" or request.ref.startswith("docker://")
        if read_directly or not may_use_docker(request.engine):
            raise  # no Docker Engine was meant
        more = f"; {error.hint}" if error.hint else ""
        raise RemoteError(
            f"no Docker Engine is running, and {rest} could not be read from its registry: {error}",
            hint=f"start the engine, or name the registry: docker://HOST/{rest}{more}",
        ) from None


def asks_engine(ref: str, engine: str) -> bool:
    """Whether an image is looked up in a Docker Engine: ``docker://`` means its registry."""
    if (kind := named(engine)) is not None:
        return kind.through_docker
    if ref.startswith("docker://"):
        return False
    from builder.engines import docker

    return docker.answers()
