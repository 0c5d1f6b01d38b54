"""A patched image into a registry: ``python -m benchmarks.registry_push [ROUNDS]``.

One file of a vLLM base in a registry is changed, and the result pushed beside it, in every way that
this machine has: spark-build, BuildKit, docker pull + build + push, crane, skopeo + umoci.  For
three sizes of base, side by side: seconds, bytes that the clients sent and got, and the most memory
that the processes of a way took.  What each way has pushed is read back, so that one that changes
nothing cannot win.  Draws ``registry_push.svg`` where matplotlib is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bases import LAYER, NEW_CONTENT, PATCHED, is_patched, patched_tar, push_base
from builder.registry.client import Registry
from tests.countproxy import CountProxy
from tests.engine import cache, debs, machine
from tests.registry.servers import CranePrograms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Compressed bytes of the bases.
SIZES = (200_000_000, 1_000_000_000, 2_200_000_000)
#: The suite whose BuildKit can push without pulling (``unpack=false,store=false``).
LAZY_SUITE = "forky"
COMMAND = str(Path(sys.executable).with_name("spark-build"))
#: Python keeps the bytecode that it has compiled, as it does for an installed package.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


@dataclass
class Run:
    """One run of one way."""

    seconds: float
    cpu: float
    sent: int
    received: int
    memory: int


@dataclass
class Way:
    """A way to patch, and how often it is run: those that move the whole base, once."""

    name: str
    run: Callable[[Bench, str], None]
    heavy: bool = False
    runs: dict[int, list[Run]] = field(default_factory=dict)


class Bench:
    """A registry behind a counting proxy, and the tools."""

    def __init__(self, proxy: CountProxy, folder: Path, tools: machine.EngineTools) -> None:
        self.proxy, self.folder, self.tools = proxy, folder, tools
        self.engine: machine.Engine | None = None
        (folder / "patches" / "change").mkdir(parents=True)
        (folder / "patches" / "change" / "layer.toml").write_text(LAYER)
        context = folder / "context"
        context.mkdir()
        (context / "core.py").write_bytes(NEW_CONTENT)
        self.tar = patched_tar(folder / "layer.tar")
        self.peak = 0

    def base(self, tag: str) -> str:
        """The base's name."""
        return f"{self.proxy.address}/bench/base:{tag}"

    def target(self, tag: str) -> str:
        """Where the result goes: another repository of the same registry."""
        return f"{self.proxy.address}/bench/patched:{tag}"

    def call(self, *words: str | Path, env: dict[str, str] | None = None) -> None:
        """Run one command of a way; the most memory that one of them has taken counts."""
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [str(word) for word in words],
                env={**_ENVIRONMENT, **(env or {})},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            while process.poll() is None:
                self.peak = max(self.peak, peaks([process.pid]))
                time.sleep(0.01)
            if process.returncode:
                said.seek(0)
                tail = said.read().decode(errors="replace")[-600:]
                raise RuntimeError(f"{words[0]} {words[1]}: {tail}")

    def docker(self, *words: str | Path) -> None:
        """Run the docker client against the engine."""
        assert self.engine is not None
        self.call(self.engine.docker, *words, env=self.engine.env)

    def measure(self, way: Way, size: int, tag: str) -> None:
        """Run a way once, and read back what it pushed."""
        self.peak = 0
        reset_peaks(self.daemons())
        self.proxy.take()
        began, used = time.perf_counter(), self.processor_seconds()
        way.run(self, tag)
        seconds, cpu = time.perf_counter() - began, self.processor_seconds() - used
        sent, received = self.proxy.take()
        memory = self.peak + peaks(self.daemons())
        way.runs.setdefault(size, []).append(Run(seconds, cpu, sent, received, memory))
        host, _, name = self.target(tag).partition("/")
        if not is_patched(Registry(host).repository(name.partition(":")[0]), tag):
            raise RuntimeError(f"{way.name} has pushed something that is not patched")

    def processor_seconds(self) -> float:
        """What commands that ended, and the engine's processes, have used so far."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = usage.ru_utime + usage.ru_stime
        for pid in self.daemons():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def daemons(self) -> list[int]:
        """The processes of the engine."""
        return [] if self.engine is None else machine.family_of(self.engine)


def reset_peaks(pids: Sequence[int]) -> None:
    """Forget how much memory processes have taken so far (Linux: ``clear_refs``)."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peaks(pids: Sequence[int]) -> int:
    """The most memory that processes have taken since, in bytes, added up."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1000
    return total


# ------------------------------------------------------------------------------------- the ways


def ours(bench: Bench, tag: str) -> None:
    """The whole command: identify, plan, build, push."""
    words = ["image", "-l", "change", "-b", f"docker://{bench.base(tag)}", "--engine", "oci"]
    words += ["--push", "-t", bench.target(tag), "--no-verify"]
    env = {"SPARK_BUILD_PATCHES": str(bench.folder / "patches")}
    env |= {"SPARK_BUILD_CACHE": str(bench.folder / "cache")}
    bench.call(COMMAND, *words, env=env)


def ours_first(bench: Bench, tag: str) -> None:
    """The same for a base that nobody here has seen: its layers are read once."""
    shutil.rmtree(bench.folder / "cache", ignore_errors=True)
    ours(bench, tag)


def crane_append(crane: Path, bench: Bench, tag: str) -> None:
    """A layer tar that somebody has made beforehand, appended by name."""
    words = ("append", "-b", bench.base(tag), "-f", bench.tar, "-t", bench.target(tag))
    bench.call(crane, *words)


def _dockerfile(bench: Bench, tag: str, flags: str) -> Path:
    text = f"FROM {bench.base(tag)}\nCOPY {flags}core.py {PATCHED}\n"
    path = bench.folder / "context" / "Dockerfile"
    path.write_text(text)
    return path.parent


def buildkit_lazy(bench: Bench, tag: str) -> None:
    """``COPY --link`` and an output that neither unpacks nor stores: nothing of the base moves."""
    output = f"type=registry,name={bench.target(tag)},unpack=false,store=false"
    context = _dockerfile(bench, tag, "--link ")
    words = ("buildx", "build", "--provenance=false", "--no-cache", "--output", output, context)
    bench.docker(*words)


def buildkit_push(bench: Bench, tag: str) -> None:
    """``COPY --link`` and ``--push``."""
    context = _dockerfile(bench, tag, "--link ")
    words = ("buildx", "build", "--provenance=false", "--no-cache", "--push")
    bench.docker(*words, "-t", bench.target(tag), context)


def pull_build_push(bench: Bench, tag: str) -> None:
    """What most people do."""
    context = _dockerfile(bench, tag, "")
    bench.docker("pull", "-q", bench.base(tag))
    bench.docker("buildx", "build", "--load", "-q", "-t", bench.target(tag), context)
    bench.docker("push", "-q", bench.target(tag))


def skopeo_umoci(umoci: Path, bench: Bench, tag: str) -> None:
    """Copy down, insert a layer, copy up; no daemon and no root."""
    layout = bench.folder / "umoci"
    shutil.rmtree(layout, ignore_errors=True)
    skopeo = bench.tools.program("skopeo")
    down = ("copy", "-q", "--src-tls-verify=false", f"docker://{bench.base(tag)}")
    bench.call(skopeo, *down, f"oci:{layout}:x")
    source = bench.folder / "context" / "core.py"
    bench.call(umoci, "insert", "--rootless", "--image", f"{layout}:x", source, PATCHED)
    up = ("copy", "-q", "--dest-tls-verify=false", f"oci:{layout}:x")
    bench.call(skopeo, *up, f"docker://{bench.target(tag)}")
    shutil.rmtree(layout)


# ---------------------------------------------------------------------------------------- running


def ways_without_engine(bench: Bench) -> Iterator[Way]:
    """Those that need no daemon."""
    yield Way("spark-build, base known", ours)
    yield Way("spark-build, base never seen", ours_first, heavy=True)
    with missing("crane"):
        crane = CranePrograms().program("crane")
        bench.call(crane, "version")
        yield Way("crane append (given the layer)", partial(crane_append, crane))
    with missing("umoci"):
        make = partial(debs.unpack, machine.TOOL_SUITE, ("umoci",))
        folder = cache.entry("umoci/1", lambda work: make(work / "tree"))
        umoci = folder / "tree" / "usr" / "bin" / "umoci"
        bench.call(umoci, "--version")
        yield Way("skopeo + umoci insert", partial(skopeo_umoci, umoci), heavy=True)


@contextlib.contextmanager
def missing(name: str) -> Iterator[None]:
    """Say that a way cannot be run here, and go on."""
    try:
        yield
    except (cache.MachineError, OSError, RuntimeError) as error:
        print(f"not here: {name}: {str(error).splitlines()[0]}", file=sys.stderr)


def run_all(bench: Bench, ways: Sequence[Way], sizes: Sequence[int], rounds: int) -> None:
    """Every way on every base, in turn; the first round of a light way warms it up."""
    for size in sizes:
        tag = f"{size // 1_000_000}m"
        for number in range(rounds + 1):
            for way in ways:
                if (way.heavy and number != 1) or (number > 1 and size not in way.runs):
                    continue
                with missing(f"{way.name} on {tag}"):
                    bench.measure(way, size, tag)
                    if not way.heavy and number == 0:
                        way.runs[size].clear()
                print(f"  {tag:>6} {way.name}", file=sys.stderr)


def with_engine(bench: Bench, sizes: Sequence[int], rounds: int) -> list[Way]:
    """The ways of Docker; each base is new to the engine every time."""
    done = []
    lazy = Way("BuildKit COPY --link, lazy output", buildkit_lazy)
    with missing(f"BuildKit of {LAZY_SUITE}"), machine.Engine(machine.engine_of(LAZY_SUITE)) as new:
        bench.engine = new
        run_all(bench, [lazy], sizes, rounds)
        done.append(lazy)
    plain = Way("BuildKit COPY --link --push", buildkit_push, heavy=True)
    classic = Way("docker pull, build, push", pull_build_push, heavy=True)
    with machine.Engine(bench.tools) as engine:
        bench.engine = engine
        for size in sizes:
            for way in (plain, classic):
                empty(engine, bench)
                run_all(bench, [way], [size], 1)
        empty(engine, bench)
        done += [plain, classic]
    bench.engine = None
    return done


def empty(engine: machine.Engine, bench: Bench) -> None:
    """Remove what a way has left, so that the next finds nothing of the base."""
    names = engine.run("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    left = [name for name in names if name.startswith(bench.proxy.address)]
    if left:
        engine.run("image", "rm", "--force", *left)
    engine.run("builder", "prune", "--all", "--force")


def report(ways: Sequence[Way], sizes: Sequence[int]) -> None:
    """A table: medians, and the time's ratio to ours."""
    first = ways[0]
    for size in sizes:
        print(f"\nbase of {size / 1e6:.0f} MB")
        print(f"  {'':<34}{'seconds':>9}{'ratio':>8}{'cpu s':>8}", end="")
        print(f"{'sent MB':>10}{'got MB':>10}{'memory MB':>11}")
        for way in ways:
            runs = way.runs.get(size)
            if not runs:
                print(f"  {way.name:<34}{'not run':>9}")
                continue
            seconds = statistics.median(run.seconds for run in runs)
            ratio = seconds / statistics.median(run.seconds for run in first.runs[size])
            print(
                f"  {way.name:<34}{seconds:>9.2f}{ratio:>8.1f}"
                f"{statistics.median(r.cpu for r in runs):>8.2f}"
                f"{statistics.median(r.sent for r in runs) / 1e6:>10.3f}"
                f"{statistics.median(r.received for r in runs) / 1e6:>10.3f}"
                f"{statistics.median(r.memory for r in runs) / 1e6:>11.0f}"
            )
    small, large = (
        statistics.median(r.seconds for r in first.runs[s]) for s in (sizes[0], sizes[-1])
    )
    growth = sizes[-1] / sizes[0]
    print(f"\nours: {large / small:.2f} times the seconds for {growth:.0f} times the base")


def draw(ways: Sequence[Way], sizes: Sequence[int], path: Path) -> bool:
    """The seconds over the size of the base, where matplotlib is installed."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for way in ways:
        points = [(s / 1e9, statistics.median(r.seconds for r in way.runs[s])) for s in sizes
                  if way.runs.get(s)]  # fmt: skip
        axes.plot(*zip(*points, strict=True), marker="o", label=way.name)
    axes.set(xlabel="base, GB compressed", ylabel="seconds", yscale="log")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight")
    return True


def main(rounds: int = 3, sizes: Sequence[int] = SIZES) -> None:
    """Make the bases, run every way, report."""
    tools = machine.ensure_engine()
    layout = machine.base_layout(tools)
    with (
        machine.Registry(tools) as registry,
        CountProxy(registry.address) as proxy,
        tempfile.TemporaryDirectory(prefix="spark-build-bench-") as folder,
    ):
        repository = Registry(proxy.address).repository("bench/base")
        for size in sizes:
            pushed = push_base(repository, layout, f"{size // 1_000_000}m", size)
            print(f"  base of {pushed / 1e6:.0f} MB", file=sys.stderr)
        bench = Bench(proxy, Path(folder), tools)
        ways = list(ways_without_engine(bench))
        ways[0].run(bench, f"{sizes[0] // 1_000_000}m")
        run_all(bench, ways, sizes, rounds)
        ways += with_engine(bench, sizes, rounds)
    report(ways, sizes)
    if draw(ways, sizes, Path("registry_push.svg")):
        print("drawn in registry_push.svg")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
