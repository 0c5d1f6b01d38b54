"""Two publishers and one tag: nobody is told that it names their image when it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.errors import RemoteError
from builder.images.registry.client import TagTaken
from builder.images.registry.model import OCI_MANIFEST, RawManifest
from tests.memoryregistry import MemoryRegistry
from tests.unit.fakeregistry import Reply, Request, manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS, THEIRS, OLD = (
    RawManifest(data=manifest(annotations={"who": who}), media_type=OCI_MANIFEST)
    for who in ("we", "they", "nobody")
)
TAG = "/v2/a/b/manifests/v1"


@pytest.fixture
def registry() -> Iterator[MemoryRegistry]:
    with MemoryRegistry() as running:
        yield running


def put(registry: MemoryRegistry, made: RawManifest) -> None:
    """What another publisher does, whatever the registry thinks of it."""
    for key in ("v1", made.digest):
        registry.manifests["a/b", key] = (made.data, made.media_type)


def test_a_free_tag(registry: MemoryRegistry) -> None:
    registry.repository().set_tag(OURS, "v1", None)
    assert registry.tag("a/b", "v1") == OURS.digest
    registry.repository().set_tag(OURS, "v1", None)  # by another with the same image


@pytest.mark.parametrize("was", [None, OLD], ids=["free", "moving"])
def test_tag_written_by_another_client_before_the_check(
    registry: MemoryRegistry, was: RawManifest | None
) -> None:
    put(registry, THEIRS)
    with pytest.raises(TagTaken) as caught:
        registry.repository().set_tag(OURS, "v1", was.digest if was else None)
    assert caught.value.seen == THEIRS.digest
    assert registry.tag("a/b", "v1") == THEIRS.digest


@pytest.mark.parametrize("was", [None, OLD], ids=["free", "moving"])
def test_tag_written_by_another_client_during_the_request(
    registry: MemoryRegistry, was: RawManifest | None
) -> None:
    """A registry that heeds conditions refuses it."""
    registry.conditional = True
    if was:
        put(registry, was)
    registry.before["PUT", TAG] = lambda: put(registry, THEIRS)
    with pytest.raises(TagTaken) as caught:
        registry.repository().set_tag(OURS, "v1", was.digest if was else None)
    assert caught.value.seen == THEIRS.digest
    assert registry.tag("a/b", "v1") == THEIRS.digest


def test_tag_overwritten_by_another_client_at_once(registry: MemoryRegistry) -> None:
    """A registry that heeds none: who was overwritten sees it."""

    def tagged() -> None:
        registry.before["HEAD", TAG] = lambda: put(registry, THEIRS)

    registry.before["PUT", TAG] = tagged
    with pytest.raises(TagTaken, match="right after"):
        registry.repository().set_tag(OURS, "v1", None)


def lose_an_answer(registry: MemoryRegistry, intruder: RawManifest | None) -> None:
    """The first PUT is done, and its answer is lost; then somebody may write the tag."""
    known = registry.answer

    def answer(request: Request) -> Reply:
        reply = known(request)
        if request.method == "PUT":
            registry.answer = known
            if intruder:
                put(registry, intruder)
            return Reply(0)
        return reply

    registry.answer = answer


@pytest.mark.parametrize("conditional", [True, False])
def test_a_lost_response(registry: MemoryRegistry, conditional: bool) -> None:
    registry.conditional = conditional
    lose_an_answer(registry, None)
    registry.repository().set_tag(OURS, "v1", None)
    assert registry.tag("a/b", "v1") == OURS.digest
    assert [request.method for request in registry.log].count("PUT") == 1


@pytest.mark.parametrize("conditional", [True, False])
def test_a_retry_never_overwrites_another_client(
    registry: MemoryRegistry, conditional: bool
) -> None:
    registry.conditional = conditional
    lose_an_answer(registry, THEIRS)
    with pytest.raises(TagTaken):
        registry.repository().set_tag(OURS, "v1", None)
    assert registry.tag("a/b", "v1") == THEIRS.digest


def test_a_registry_with_another_etag(registry: MemoryRegistry) -> None:
    """Its entity tags are not digests: our condition can never hold."""
    put(registry, OLD)
    known = registry.answer
    registry.answer = lambda r: Reply(412) if "If-Match" in r.headers else known(r)
    registry.repository().set_tag(OURS, "v1", OLD.digest)
    assert registry.tag("a/b", "v1") == OURS.digest


def test_a_manifest_damaged_in_transit_is_written_again(registry: MemoryRegistry) -> None:
    registry.conditional = True
    known = registry.answer

    def damage(request: Request) -> Reply:
        if request.method == "PUT":
            registry.answer = known
            put(registry, OLD)
            return Reply(201, headers={"Docker-Content-Digest": OLD.digest})
        return known(request)

    registry.answer = damage
    registry.repository().set_tag(OURS, "v1", None)
    assert registry.tag("a/b", "v1") == OURS.digest


@pytest.mark.parametrize("was", [None, OLD], ids=["free", "moving"])
@pytest.mark.parametrize("at", ["first", "after"])
def test_a_head_that_lies_is_no_proof(
    registry: MemoryRegistry, was: RawManifest | None, at: str
) -> None:
    """What counts is what who pulls the tag gets."""
    if was:
        put(registry, was)
    known, lies = registry.answer, at == "first"

    def answer(request: Request) -> Reply:
        nonlocal lies
        if request.method == "PUT" and request.path == TAG:
            lies = True
            return Reply(201)  # and is not stored
        if request.method == "HEAD" and request.path == TAG and lies:
            return Reply(200, headers={"Docker-Content-Digest": OURS.digest})
        return known(request)

    registry.answer = answer
    with pytest.raises(RemoteError):
        registry.repository().set_tag(OURS, "v1", was.digest if was else None)
