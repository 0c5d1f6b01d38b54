"""How large what a lock holds of a base is, for the files of a real vLLM image."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from builder.applier.values import sha256_hex
from builder.common.reference import Ref
from builder.common.wheels import WheelTree
from builder.images.bases.identify import identify
from builder.images.rootfs.facts import RecordedFiles
from builder.images.rootfs.index import Row
from builder.images.subject import BaseRequest
from builder.layers.catalog import Catalog
from builder.layers.lock import pack
from builder.layers.planner import make_plan

if TYPE_CHECKING:
    import pytest

    from builder.common.pypi import PackageIndex
    from builder.layers.pinned import IndexSources

SITE = "usr/local/lib/python3.12/dist-packages"
#: vLLM's images have FlashInfer's kernels installed, which are most of the files.
BASE = "pypi:vllm==0.20.1,flashinfer-cubin==0.6.8.post1"


def test_the_facts_of_a_real_base_take_a_megabyte(
    index: PackageIndex, sources: IndexSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = Catalog.discover().select(["b12x-full"])
    request = BaseRequest(
        ref=Ref(BASE), platform="linux/arm64", python="3.12", pins=selection.pins(), index=index
    )
    base = identify(request)
    assert isinstance(base.tree, WheelTree)
    facts = RecordedFiles(["sha256:" + "0" * 64])
    read = WheelTree.read

    def noting(tree: WheelTree, path: str) -> bytes | None:
        data = read(tree, path)
        if data is not None:
            facts.note_content(data)
        return data

    monkeypatch.setattr(WheelTree, "read", noting)
    assert make_plan(base, selection, sources).needed
    rows = {}
    for wheel in base.tree.wheels:
        record = f"{wheel.info_dir}/RECORD"
        data = wheel.read(record)
        facts.note_content(data)
        for path, member in wheel.members.items():
            sha256 = sha256_hex(data) if path == record else member.sha256
            rows[path] = Row(path, "file", member.size, member.mode, sha256=sha256)
    facts.note_below(SITE, rows)
    assert len(rows) > 15_000
    packed = pack(facts)
    assert len(packed) < 1_100_000, "0.93 MB for an image of these wheels"
    assert RecordedFiles.parse(json.loads(json.dumps(facts.as_json()))).lacks(facts) == 0
