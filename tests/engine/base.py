"""The base image that the tests patch: Debian's Python and the real released wheels.

No registry with the official images can be reached from a bare machine, so a base is made that
has what matters of them: the same files of vLLM, FlashInfer and the CuTe DSL at the same kind of
path, as pip leaves them (bytecode and a true RECORD included), and the same entry point. What
differs is torch: the release's own, with stand-ins for CUDA's libraries, which are gigabytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.proof.sandbox import torch_folder

from . import cache, debs, ocilayout
from .cache import MachineError, call, megabytes, say

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Sequence

REQUIREMENTS = Path(__file__).with_name("base-requirements.txt")
REPOSITORY = "spark-build-test/vllm"
SUITE = "bookworm"
DEBIAN_PACKAGES = ("python3", "python3-venv", "python3-pip", "ca-certificates")
SITE = "/usr/local/lib/python3.11/dist-packages"
# These make the last layer; all other requirements are what they need to be imported.
UNDER_TEST = (
    "vllm",
    "flashinfer-python",
    "flashinfer-cubin",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
)
CONFIG: dict[str, Any] = {
    "Env": [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG=C.UTF-8",
        "PYTHONUNBUFFERED=1",
    ],
    "Entrypoint": ["vllm", "serve"],
    "WorkingDir": "/",
    "Labels": {"org.opencontainers.image.title": "vLLM without CUDA, for tests of spark-build"},
}
NEVER_IMPORTED = r"/(tests?|testing)/|/transformers/models/"
# Bump when the code below makes something else of the same inputs.
RECIPE = "3"
# pip writes its own interpreter into console scripts: let that be the image's, so that the
# hashes that it records are true.
PIP = (
    "import runpy, sys; sys.executable = '/usr/bin/python3'; sys.argv[0] = 'pip'; "
    "runpy.run_module('pip', run_name='__main__')"
)


def requirements() -> dict[str, str]:
    """The pinned versions of everything Python in the base image."""
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def reference() -> str:
    """Name and tag of the base image; the tag changes with whatever goes into it."""
    inputs = [REQUIREMENTS.read_text(), RECIPE, SUITE, SITE, json.dumps(CONFIG), *DEBIAN_PACKAGES]
    return f"{REPOSITORY}:{requirements()['vllm']}-{cache.key(inputs)}"


def base_layout(mmdebstrap: Path) -> Path:
    """The base image as an OCI layout in the cache, made on first use."""
    tag = reference().rpartition(":")[2]
    return cache.entry(f"base/{tag}", partial(_make_layout, mmdebstrap))


def _make_layout(mmdebstrap: Path, layout: Path) -> None:
    _refuse_unfit_python()
    work = layout.parent
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(debian_layer, mmdebstrap, work, layout, DEBIAN_PACKAGES),
            pool.submit(_wheels_layer, "dependencies", work, layout, lambda n: n not in UNDER_TEST),
            pool.submit(_wheels_layer, "wheels-under-test", work, layout, UNDER_TEST.__contains__),
        ]
        layers = [job.result() for job in jobs]
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ocilayout.finish(layout, layers, CONFIG, created, reference())
    say(f"base image: {megabytes(layout)} compressed in {len(layers)} layers")


def _refuse_unfit_python() -> None:
    if sys.version_info[:2] != (3, 11) or os.uname().machine != "x86_64":
        raise MachineError(
            "the base image holds x86-64 wheels for Debian 12's Python 3.11, so the tests "
            f"must run on x86-64 under Python 3.11, not {sys.version.split()[0]} on "
            f"{os.uname().machine}"
        )


def debian_layer(
    mmdebstrap: Path, work: Path, layout: Path, packages: Sequence[str]
) -> ocilayout.Layer:
    """A bare Debian with some packages, made in a mount namespace of its own."""
    sources, tar, temporary = work / "sources.list", work / "debian.tar", work / "mmdebstrap"
    sources.write_text(debs.source_line(SUITE))
    temporary.mkdir()
    say(f"making a Debian {SUITE} with {', '.join(packages)}")
    call(
        "unshare", "--mount", "--propagation", "private",
        mmdebstrap, "--quiet", "--mode=root", "--variant=minbase",
        f"--include={','.join(packages)}",
        SUITE, tar, sources, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    layer = ocilayout.write_layer(
        layout,
        "debian",
        lambda target: ocilayout.copy_tar(target, tar, skip=_is_device),
    )
    return report(layer, tar)


def _is_device(name: str) -> bool:
    return name.startswith("./dev/")


def _wheels_layer(
    name: str, work: Path, layout: Path, wanted: Callable[[str], bool]
) -> ocilayout.Layer:
    """Some of the pinned wheels, laid out by pip as it would lay them out in the image."""
    pins = [f"{d}=={v}" for d, v in requirements().items() if wanted(d) and d != "torch"]
    stage = work / name
    tested = wanted(UNDER_TEST[0])
    say(f"pip installs {len(pins)} wheels ({name})")
    call(
        sys.executable, "-c", PIP, "install", "--quiet", "--no-deps", "--ignore-installed",
        "--only-binary=:all:", "--no-warn-script-location",
        "--compile" if tested else "--no-compile",
        "--root", stage, "--prefix", "/usr/local", *pins,
    )  # fmt: skip
    made = next(stage.glob("usr/local/lib/python3.11/*-packages"), None)
    if made is None:
        raise MachineError(f"pip put nothing under usr/local/lib/python3.11 of {stage}")
    if not tested:
        torch = torch_folder(requirements()["torch"]).folder
        shutil.copytree(torch, made, dirs_exist_ok=True)
        _compile(stage, made)
    layer = ocilayout.write_layer(layout, name, partial(_add_site, stage, made))
    report(layer, stage)
    shutil.rmtree(stage)
    return layer


def _compile(stage: Path, made: Path) -> None:
    """Bytecode for what an import of vLLM needs: compiling the rest as well takes a minute.

    Files that no Python 3 can compile are part of some wheels, so the exit status says nothing.
    """
    command = ["-m", "compileall", "-qq", "-x", NEVER_IMPORTED, "-s", str(stage), "-p", "/"]
    subprocess.run([sys.executable, *command, str(made)], check=False, capture_output=True)


def _add_site(stage: Path, made: Path, tar: tarfile.TarFile) -> None:
    """Debian calls the folder dist-packages; it is as deep as pip's, so RECORD stays true."""
    source = str(made.relative_to(stage))
    ocilayout.add_tree(tar, stage, lambda name: name.replace(source, SITE.lstrip("/"), 1))


def report(layer: ocilayout.Layer, source: Path) -> ocilayout.Layer:
    say(f"layer {layer.note}: {megabytes(source)}, {layer.size / 1e6:.0f} MB compressed")
    return layer
