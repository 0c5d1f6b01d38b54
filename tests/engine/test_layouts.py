"""Our reading of layouts against umoci and skopeo: what no runtime unpacks is refused.

What is accepted is the same tree for umoci, and has the same settings for skopeo.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.reference import Ref
from builder.errors import SparkBuildError
from builder.images.rootfs.image import LayerCache, open_image
from builder.images.rootfs.view import Rootfs
from tests.unit import layoutcases

from . import machine, runtimes

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20_261_123
#: A larger run by hand sets the variable.
COUNT = int(os.environ.get("SPARK_BUILD_TEST_LAYOUTS", "200"))
#: What Docker and containerd unpack, and umoci does not know.
ONLY_UMOCI = re.compile(
    r"blob is not correct mediatype: application/vnd\.(docker\.image\.rootfs\.(foreign\.)?diff\.tar"
    r"(\.gzip|\.zstd)?|oci\.image\.layer\.v1\.tar\+zstd)$|config blob is not correct mediatype "
    r"application/vnd\.oci\.image\.config\.v1\+json: application/vnd\.docker\.container"
    r"|not implemented: application/vnd\.docker"
)

Tree = dict[str, tuple[str, str]]


pytestmark = pytest.mark.usefixtures("root_for_runtimes")


def ours(root: Path) -> tuple[Tree, dict[str, Any]] | str:
    """The tree and the settings as we read them, or what we say against them."""
    try:
        image = open_image(Ref(f"oci:{root}:{layoutcases.NAME}"))
        try:
            view = Rootfs(image.layers, LayerCache(image.source, diff_ids=image.diff_ids))
            try:
                seen = {p: (e.kind, e.row.sha256) for p, e in view.below("/").items()}
            finally:
                view.close()
            return seen, dict(image.config.settings)
        finally:
            image.close()
    except SparkBuildError as error:
        return str(error)


def of_umoci(umoci: Path, root: Path, out: Path) -> Tree | str:
    """The tree that umoci unpacks, or what it says."""
    words = [str(umoci), "raw", "unpack", "--image", f"{root}:{layoutcases.NAME}", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        return done.stderr.strip()[-300:]
    found = runtimes._tree(out)
    return {path: (kind, text if kind == "file" else "") for path, (kind, _, text) in found.items()}


def of_skopeo(skopeo: Path, root: Path, out: Path) -> dict[str, Any] | str:
    """The settings that skopeo reads from an image that it can copy, or what it says."""
    name = f"oci:{root}:{layoutcases.NAME}"
    here = [str(skopeo), "--override-os", "linux", "--override-arch", "arm64"]
    text = ""
    for words in (["copy", "--quiet", name, f"oci:{out}:x"], ["inspect", "--config", name]):
        done = subprocess.run(
            [*here, *words], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            return done.stderr.strip()[-300:]
        text = done.stdout
    return dict(json.loads(text).get("config") or {})


def test_random_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case has a seed of its own, so that one can be tried alone."""
    umoci = runtimes.programs() / "umoci"
    skopeo = machine.ensure_engine().program("skopeo")
    accepted, refused, wrong = 0, 0, []
    for number in range(COUNT):
        dice = random.Random(f"{SEED} {number}")
        folder = tmp_path / str(number)
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(folder / "cache"))
        layoutcases.write_case(folder / "layout", layoutcases.random_case(dice), dice)
        mine = ours(folder / "layout")
        tree = of_umoci(umoci, folder / "layout", folder / "umoci")
        settings = of_skopeo(skopeo, folder / "layout", folder / "skopeo")
        if isinstance(mine, str):
            refused += isinstance(tree, str) and isinstance(settings, str)
        else:
            accepted += 1
            wrong += [f"{number}: {why}" for why in _differences(*mine, tree, settings)]
        shutil.rmtree(folder)
    print(f"{COUNT} layouts, seed {SEED}: {accepted} accepted, {refused} refused by all")
    assert not wrong, "\n".join(wrong)
    assert accepted > COUNT // 10, "most cases are refused, so that they show nothing"
    assert refused > COUNT // 10


def _differences(
    mine: Tree, read: dict[str, Any], tree: Tree | str, settings: dict[str, Any] | str
) -> list[str]:
    found = []
    if isinstance(tree, str):
        found += [] if ONLY_UMOCI.search(tree) else [f"umoci: {tree}"]
    elif tree != mine:
        found.append(f"umoci sees {tree}, we {mine}")
    known = {key: value for key, value in read.items() if value and key not in layoutcases.JUNK}
    if isinstance(settings, str):
        found.append(f"skopeo: {settings}")
    elif {key: value for key, value in settings.items() if value} != known:
        found.append(f"skopeo reads {settings}, we {known}")
    return found
