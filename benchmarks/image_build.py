"""Building on a base that is present: ``python -m benchmarks.image_build``.

``spark-build image`` against a hand-written Dockerfile with one ``RUN`` for each patch, on the same
base (real vLLM 0.20.1 wheels), with the same local wheels and no network, in a private Docker
Engine. BuildKit's cache is emptied before every run. Reports seconds, and the bytes that each adds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Sample, report, run_once, side_by_side
from builder.common.paths import cache_dir
from tests.engine.machine import Engine, base_image

COMMAND = str(Path(sys.executable).with_name("spark-build"))
TAG = "spark-build-bench/ours:latest"
HAND = "spark-build-bench/hand:latest"
BY_HAND, OURS = "Dockerfile, one RUN a patch", "spark-build image"

#: What people write today: the same end state, a step each. The vLLM files come as a tar.
DOCKERFILE = """\
FROM {base}
RUN --network=none --mount=type=bind,target=/ctx pip install --break-system-packages --no-deps \
  --no-index --force-reinstall /ctx/{cu13}
RUN --network=none sed -i 's/if not arch == Arch.sm_120a:/if arch not in (Arch.sm_120a, \
Arch.sm_121a):/' {site}/nvidia_cutlass_dsl/python_packages/cutlass/cute/nvgpu/warp/mma.py
RUN --network=none --mount=type=bind,target=/ctx pip install --break-system-packages --no-deps \
  --no-index /ctx/{flashinfer}
RUN --network=none sed -i 's/sm_version != "sm_120"/sm_version not in ("sm_120", "sm_121")/' \
  {site}/flashinfer/gemm/kernels/dense_blockscaled_gemm_sm120.py
RUN --network=none --mount=type=bind,target=/ctx tar -xf /ctx/vllm.tar -C {site}
ENV VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x CUTE_DSL_ARCH=sm_121a FLASHINFER_DISABLE_VERSION_CHECK=1
"""


class Bench:
    """One engine, one base, two ways to build on it."""

    def __init__(self, engine: Engine, base: str, context: Path) -> None:
        self.engine, self.base, self.context = engine, base, context
        self.env = {**os.environ, **engine.env}
        self.stages: list[dict[str, float]] = []

    def ours(self) -> Sample:
        """The whole command, without the verification that the other way has none of."""
        self.empty_cache()
        words = ["image", "-l", "b12x-full", "-b", self.base, "-t", TAG, "--no-verify", "--json"]
        sample, output = self._timed([COMMAND, *words])
        self.stages.append(json.loads(output)["timings"])
        return sample

    def by_hand(self) -> Sample:
        """``docker buildx build`` of the hand-written file."""
        self.empty_cache()
        words = ["buildx", "build", "--load", "-q", "-t", HAND, str(self.context)]
        return self._timed([self.engine.docker, *words])[0]

    def _timed(self, command: list[str]) -> tuple[Sample, str]:
        out = self.context.parent / "output"
        script = 'exec "$@" >"$OUT"'
        env = {**self.env, "OUT": str(out)}
        sample = run_once(["sh", "-c", script, "sh", *command], env)
        return sample, out.read_text()

    def empty_cache(self) -> None:
        """Remove the results of earlier rounds, images and cache."""
        for tag in (TAG, HAND):
            self._quiet("rmi", "-f", tag)
        self._quiet("builder", "prune", "-af")

    def _quiet(self, *words: str) -> None:
        subprocess.run([self.engine.docker, *words], env=self.env, capture_output=True, check=False)

    def added(self, tag: str) -> int:
        """Uncompressed bytes of the layers that are not the base's."""
        return self._layers(tag) - self._layers(self.base)

    def _layers(self, tag: str) -> int:
        words = ["history", "--no-trunc", "--human=false", "--format", "{{.Size}}", tag]
        answer = subprocess.run(
            [self.engine.docker, *words], env=self.env, capture_output=True, text=True, check=True
        )
        return sum(int(line) for line in answer.stdout.split())


def prepare(bench: Bench, engine: Engine) -> None:
    """Put the wheels, the patched vLLM files and the Dockerfile into the context."""
    bench.ours()  # fetches the wheels
    words = ["-v", "plan", "-l", "b12x-full", "-b", bench.base, "--json"]
    answer = subprocess.run(
        [COMMAND, *words], env=bench.env, capture_output=True, text=True, check=True
    )
    plan: dict[str, Any] = json.loads(answer.stdout)
    names = {}
    for layer in plan["layers"]:
        for pin in layer.get("inputs", []):
            if layer["name"] in ("cutlass-dsl-cu13", "flashinfer-b12x"):
                wheel = cache_dir() / "wheels" / pin["sha256"] / pin["filename"]
                shutil.copy(wheel, bench.context)
                names[layer["name"]] = pin["filename"]
    backend = next(x for x in plan["layers"] if x["name"] == "vllm-b12x-backend")
    files = [f["path"] for f in backend["files"] if f["after"]]
    site = plan["base"]["site_packages"]
    tar = f"tar -C {site} -cf - {' '.join(files)}"
    words = ["run", "--rm", "--network=none", "--entrypoint", "sh", TAG, "-c", tar]
    with (bench.context / "vllm.tar").open("wb") as out:
        subprocess.run([engine.docker, *words], env=bench.env, stdout=out, check=True)
    (bench.context / "Dockerfile").write_text(
        DOCKERFILE.format(
            base=bench.base,
            site=site,
            cu13=names["cutlass-dsl-cu13"],
            flashinfer=names["flashinfer-b12x"],
        )
    )


def measured(rounds: int) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """Both ways in turn; and the bytes that each adds."""
    with Engine() as engine, tempfile.TemporaryDirectory() as folder:
        context = Path(folder) / "context"
        context.mkdir()
        bench = Bench(engine, base_image(engine), context)
        prepare(bench, engine)
        bench.stages.clear()
        samples = side_by_side({BY_HAND: bench.by_hand, OURS: bench.ours}, rounds)
        bench.ours()
        added = {OURS: bench.added(TAG)}
        bench.by_hand()
        added[BY_HAND] = bench.added(HAND)
        stages = bench.stages[1 : rounds + 1]
        samples["  of that, the build"] = [
            Sample(stage["build"], sample.cpu)
            for stage, sample in zip(stages, samples[OURS], strict=True)
        ]
        bench.empty_cache()
        return samples, added


def main(rounds: int = 5) -> None:
    """Run both ways in turn and report."""
    samples, added = measured(rounds)
    report("image build on a base that is present", samples)
    print("\nbytes added: " + ", ".join(f"{name} {n / 1e6:.1f} MB" for name, n in added.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
