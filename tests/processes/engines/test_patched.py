"""Layers of an image that another server has."""

from __future__ import annotations

import dataclasses
import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from builder.bases.identify import identify
from builder.bases.model import BaseRequest
from builder.errors import RemoteError
from builder.pypi.index import PackageIndex
from builder.registry.layout import LayoutDirectory
from tests.unit.engines.test_patched import EDIT, build, manifest_of
from tests.unit.fakes import (
    make_layer,
    make_plan_of,
)
from tests.unit.images import put_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """An address at which the files of a directory are to be had."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def put_foreign(root: Path, urls: list[str]) -> list[dict[str, Any]]:
    """An image with a layer that is not in its layout; gives its layers."""
    raw = put_vllm(root)
    value = raw.json()
    value["layers"][1] |= {
        "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "urls": urls
    }  # fmt: skip
    raw = dataclasses.replace(raw, data=json.dumps(value).encode())
    LayoutDirectory(root).put_manifest(raw, "foreign")
    name = value["layers"][1]["digest"].removeprefix("sha256:")
    (root / "blobs/sha256" / name).rename(root.parent / "elsewhere" / "layer")
    layers: list[dict[str, Any]] = value["layers"]
    return layers


def test_a_foreign_layer_is_read_from_its_address(tmp_path: Path, elsewhere: str) -> None:
    urls = ["http://far.example/layer", "ftp://x/", f"{elsewhere}/gone", f"{elsewhere}/layer"]
    layers = put_foreign(tmp_path / "base", urls)
    ref = f"oci:{tmp_path}/base:foreign"
    base = identify(BaseRequest(ref=ref, pins={}, index=PackageIndex()))
    build(base, tmp_path / "out", make_plan_of(base, make_layer("fix", EDIT)))
    assert manifest_of(tmp_path / "out")["layers"][:2] == layers


@pytest.mark.parametrize("harm", ["wrong", "nowhere"])
def test_a_foreign_layer_with_a_wrong_digest(tmp_path: Path, elsewhere: str, harm: str) -> None:
    put_foreign(tmp_path / "base", [f"{elsewhere}/layer"])
    layer = tmp_path / "elsewhere" / "layer"
    layer.write_bytes(layer.read_bytes()[:-1] + b"x") if harm == "wrong" else layer.unlink()
    ref = f"oci:{tmp_path}/base:foreign"
    message = "the data received for" if harm == "wrong" else "could not be fetched: 127"
    with pytest.raises(RemoteError, match=message):
        identify(BaseRequest(ref=ref, pins={}, index=PackageIndex()))
