"""The image that the tests compile in: Debian's g++, and nvcc as the package index has it.

Its versions are those of the machine that these tests were written on, so that what is compiled
there and here can be compared byte for byte.
"""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from . import base, cache, ocilayout
from .cache import call, megabytes, say

if TYPE_CHECKING:
    import tarfile
    from pathlib import Path

REPOSITORY = "spark-build-test/toolkit"
WHEELS = (
    "nvidia-cuda-nvcc==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
)  # fmt: skip
HOME = "usr/local/cuda"
#: Where nvcc looks, and the wheels' folders.
LINKS = {
    "lib64": "lib",
    "lib/libcudart.so": "libcudart.so.13",
    "targets/x86_64-linux/include": "../../include",
    "targets/x86_64-linux/lib": "../../lib",
}
CONFIG: dict[str, Any] = {
    "Env": [f"PATH=/{HOME}/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"]
}
RECIPE = "1"


def reference() -> str:
    """Name and tag of the image; the tag changes with whatever goes into it."""
    inputs = [*WHEELS, RECIPE, base.SUITE, json.dumps(CONFIG), json.dumps(LINKS)]
    return f"{REPOSITORY}:{cache.key(inputs)}"


def toolkit_layout(mmdebstrap: Path) -> Path:
    """The image as an OCI layout in the cache, made on first use."""
    tag = reference().rpartition(":")[2]
    return cache.entry(f"toolkit/{tag}", partial(_make_layout, mmdebstrap))


def _make_layout(mmdebstrap: Path, layout: Path) -> None:
    work = layout.parent
    with ThreadPoolExecutor(2) as pool:
        debian = pool.submit(base.debian_layer, mmdebstrap, work, layout, ("g++",))
        wheels = pool.submit(_wheels_layer, work, layout)
        layers = [debian.result(), wheels.result()]
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ocilayout.finish(layout, layers, CONFIG, created, reference())
    say(f"toolkit image: {megabytes(layout)} compressed")


def _wheels_layer(work: Path, layout: Path) -> ocilayout.Layer:
    stage = work / "toolkit"
    say(f"pip lays out {', '.join(WHEELS)}")
    call(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
        "--no-compile", "--target", stage, *WHEELS,
    )  # fmt: skip
    layer = ocilayout.write_layer(layout, "toolkit", partial(_add, stage / "nvidia" / "cu13"))
    base.report(layer, stage)
    shutil.rmtree(stage)
    return layer


def _add(tree: Path, tar: tarfile.TarFile) -> None:
    for link, target in LINKS.items():
        (tree / link).parent.mkdir(parents=True, exist_ok=True)
        (tree / link).symlink_to(target)
    ocilayout.add_tree(tar, tree, lambda name: f"{HOME}/{name}")
