"""Random answers of a registry."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import sha256_digest
from builder.images.registry.reference import Options
from tests.unit.fakeregistry import FakeRegistry, Reply, Request
from tests.unit.images.rootfs.test_fuzz import (  # noqa: F401 - two fixtures
    Made,
    _bounded,
    broken,
    dices,
    document,
    fine,
    made,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.unit.caller import Call


# -------------------------------------------------------------------------------------- registries

STATUS = (200, 200, 200, 201, 204, 206, 301, 307, 400, 401, 403, 404, 416, 429, 500, 503, 0)
HEADERS = (
    ("Content-Type", ("", "text/html", "application/json", "x/y; z", "\xe9")),
    ("Docker-Content-Digest", ("", "sha256:x", "sha256:" + "0" * 64, "md5:1")),
    ("WWW-Authenticate", ("", "Bearer", 'Bearer realm="x"', 'Bearer realm="http://[::1"', "Basic",
                          'Bearer realm="", scope=,,"', "Negotiate", 'Digest x="' + "a" * 9000)),
    ("Location", ("", "/", "//", "http://[", "https://127.0.0.1:1/", "http://127.0.0.1:99999/",
                  "\\\\x")),
    ("Link", ("", "<", '</v2/x>; rel="next"', "<x>; rel=next")),
    ("Content-Range", ("", "bytes 0-0/1", "bytes x")),
    ("Content-Encoding", ("gzip", "x")),
    ("Retry-After", ("", "x", "-1", "0")),
)  # fmt: skip


def answers(root: Path, dice: random.Random) -> Callable[[Request], Reply]:
    """A registry with the image of a layout, some of whose answers are of chance."""
    layout = LayoutDirectory(root)
    manifest = layout.manifest("")

    def honest(request: Request) -> Reply:
        kind, _, reference = request.path.partition("?")[0].rpartition("/")
        if kind.endswith("/manifests") and reference in ("t", manifest.digest):
            about = {"Content-Type": manifest.media_type, "Docker-Content-Digest": manifest.digest}
            return Reply(200, manifest.data, about)
        blob = root / LayoutDirectory.blob_path(reference) if "/blobs" in kind else None
        if blob is not None and blob.is_file():
            return Reply(200, blob.read_bytes(), {"Docker-Content-Digest": reference})
        return Reply(200 if request.path == "/v2/" else 404, b"{}")

    def answer(request: Request) -> Reply:
        reply = honest(request)
        if dice.random() < 0.6:
            return reply
        changes: dict[str, Any] = {}
        if dice.random() < 0.5:
            changes["status"] = dice.choice(STATUS)
        if dice.random() < 0.5:
            header, values = dice.choice(HEADERS)
            changes["headers"] = {**reply.headers, header: dice.choice(values)}
        if dice.random() < 0.3:
            known = reply.body[:1] == b"{"
            changes["body"] = document(dice, reply.body) if known else broken(dice, reply.body)
        if dice.random() < 0.1:
            changes |= {"length": dice.choice((-1, 0, 1)), "cut": True}
        return replace(reply, **changes)

    return answer


def test_a_registry(
    call: Call, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are lies, cut short, or of another protocol."""
    root = tmp_path / "work" / "image"
    made.put(root)
    monkeypatch.setitem(Options.__init__.__kwdefaults__ or {}, "pause", lambda _seconds: None)
    for name, dice in dices("registry"):
        monkeypatch.setenv(
            "SPARK_BUILD_CACHE", str(tmp_path / f"cache-{sha256_digest(name.encode())[7:19]}")
        )
        with FakeRegistry(answers(root, dice)) as registry:
            image = f"docker://{registry.address}/a/b:t"
            fine(call, name, "plan", "-l", "fix", "-b", image, "--json")
            fine(call, name, "verify", image, "--level", "static", "--json")
