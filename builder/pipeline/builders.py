"""``--builder``, ``--cache-from`` and ``--cache-to`` of ``spark-build image``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from builder.engines.builders import cache_words, check_name
from builder.engines.kinds import named
from builder.errors import EngineError, RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.pipeline.options import ImageOptions


def check_builder(options: ImageOptions) -> None:
    """Check the options before anything is read.

    Raises:
        UsageError: the options contradict each other, or one is malformed.
    """
    if options.builder:
        check_name(options.builder)
    cache_words(options.cache_from, "from")
    cache_words(options.cache_to, "to")
    asked = {
        "--builder": options.builder,
        "--cache-from": options.cache_from,
        "--cache-to": options.cache_to,
    }
    given = next((name for name, value in asked.items() if value), None)
    if given is None:
        return
    kind = named(options.engine)
    if kind is not None and not kind.has_builders:
        raise UsageError(
            f"{given} is for the buildkit engine; the {kind.name} engine has its own layer cache",
            hint="--engine buildkit",
        )
    if options.thin or options.plan.single_layer:
        thing = "--thin" if options.thin else "--single-layer"
        raise UsageError(f"{thing} is for the oci engine, {given} for the buildkit engine")
    if options.is_index:
        raise UsageError(f"{given}: the buildkit engine builds for one platform")


@contextlib.contextmanager
def of_registry(ref: str, builder: str) -> Iterator[None]:
    """Refuse a base on this machine for a remote builder, with a clear message."""
    try:
        yield
    except RemoteError as error:
        if not builder or not _is_here(ref):
            raise
        raise RemoteError(
            f"{ref} is in the Docker Engine here, but builder {builder} takes its base from a "
            f"registry: {error}",
            hint="push it to a registry that the builder can reach, then use "
            "--base docker://HOST/NAME:TAG",
        ) from None


def _is_here(ref: str) -> bool:
    from builder.engines import docker

    try:
        client = docker.connect()
    except EngineError:
        return False
    try:
        docker.find_image(client, ref.removeprefix("docker://"), None, pull=False)
    except RemoteError:
        return False
    finally:
        client.close()
    return True
