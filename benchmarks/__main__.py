"""Every benchmark in one command: ``python -m benchmarks [--only NAME,...] [--rounds N]``.

Each subject is measured beside its alternatives, which take turns on one machine.  Writes all runs
as ``benchmarks.json``, and one page with a plot for each subject as ``benchmarks.html``.

``--earlier .../bin/spark-build`` measures another spark-build in the same turns: what a change did.

``--quick`` runs everything once on little data, prints no figure and writes nothing: for CI, which
wants to know of errors.  Exit 1 where a subject failed; each way without its tool is named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from benchmarks import diagnose_log, image_build, registry_push
from benchmarks.chart import plot
from benchmarks.measure import Sample, run_once, side_by_side
from benchmarks.meter import ENVIRONMENT
from builder.common.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchmarks.meter import Run

OURS, EARLIER = "spark-build", "earlier spark-build"
COMMAND = str(Path(sys.executable).with_name("spark-build"))
RELEASE = "0.20.1"
BASE = f"pypi:vllm=={RELEASE}"
#: Megabytes of the bases in the registry; and for ``--quick``.
SIZES, FEW = (500, 1000), (40,)
_ROUNDS = 5
#: The versions of glibc that vLLM's wheels for arm64 were built for, as the DGX Spark's (2.39) has
#: them all.
_GLIBC = (31, 35)


@dataclass
class Subject:
    """What is measured: its ways with all runs, in seconds; the first is ours."""

    title: str
    about: str
    #: way -> each run's figures by name: ``seconds``, ``cpu``, and bytes where they are known
    ways: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    #: way -> why it was not run
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, runs: Iterable[Sample | Run]) -> None:
        """Add the runs of a way."""
        self.ways[name] = [
            {"seconds": run.wall, "cpu": run.cpu} if isinstance(run, Sample) else dict(vars(run))
            for run in runs
        ]

    def spread(self, key: str) -> list[dict[str, Any]]:
        """For each way the least, the median and the most of a figure."""
        return [
            {"name": name, key: [min(all_runs), statistics.median(all_runs), max(all_runs)]}
            for name, runs in self.ways.items()
            if (all_runs := [max(run[key], 1e-3) for run in runs if key in run])
        ]


@dataclass(frozen=True)
class Setting:
    """How much is measured, a folder for what commands write, and another spark-build."""

    rounds: int
    quick: bool
    folder: Path
    earlier: str | None = None

    def tools(self) -> dict[str, str]:
        """Each spark-build that is measured, by its name in a table."""
        return {OURS: COMMAND} | ({EARLIER: self.earlier} if self.earlier else {})

    def image_of(self, tool: str) -> str:
        """The image layout that a spark-build writes, a folder for each."""
        return f"oci:{self.folder}/{tool.replace(' ', '-')}"


def _command(*words: str, env: Mapping[str, str] | None = None) -> Callable[[], Sample]:
    return partial(run_once, words, {**ENVIRONMENT, **(env or {})})


def _in_turn(subject: Subject, ways: Mapping[str, Callable[[], Sample]], rounds: int) -> Subject:
    """Measure commands in turn; what a command writes to stderr is the error of a subject."""
    for name, runs in side_by_side(ways, rounds).items():
        subject.add(name, runs)
    return subject


def _of_each(setting: Setting, name: str, words: Sequence[str]) -> dict[str, Callable[[], Sample]]:
    """A command line of each spark-build; ``OUT`` stands for an image of its own.

    Another version has a cache of its own: what it writes, ours would have to make again.
    """
    own = {"SPARK_BUILD_CACHE": str(setting.folder / "cache of the earlier")}
    return {
        f"{tool} {name}": _command(
            command,
            *[setting.image_of(tool) if word == "OUT" else word for word in words],
            env=own if tool == EARLIER else None,
        )
        for tool, command in setting.tools().items()
    }


def start(setting: Setting) -> Iterable[Subject]:
    """Start-up against the import of its largest dependency, and against pip."""
    subject = Subject(title="Start-up", about="--help, beside what a Python program costs at least")
    yield _in_turn(
        subject,
        {
            **_of_each(setting, "--help", ["--help"]),
            'python -c "import typer"': _command(sys.executable, "-c", "import typer"),
            "pip --help": _command(sys.executable, "-m", "pip", "--help"),
        },
        setting.rounds,
    )


def warm(setting: Setting) -> Iterable[Subject]:
    """Commands whose inputs are in the cache: their first run is not counted."""
    layers = ("-l", "b12x-full", "-b", BASE)
    subject = Subject(
        title="Again, with everything in the cache",
        about=f"b12x-full on the wheels of vLLM {RELEASE}; with --refresh the checks run again",
    )
    yield _in_turn(
        subject,
        {
            **_of_each(setting, "plan", ["plan", *layers]),
            **_of_each(setting, "image, with its proof", ["image", *layers, "--output", "OUT"]),
            **_of_each(setting, "verify", ["verify", "OUT"]),
            **_of_each(setting, "verify --refresh", ["verify", "OUT", "--refresh"]),
            "pip download, wheel known": _pip_download(setting, "again", BASE),
        },
        setting.rounds,
    )


def _pip_download(setting: Setting, name: str, base: str, *more: str) -> Callable[[], Sample]:
    """Download the wheel of the same release: what somebody does who looks into it by hand."""
    words = (
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
        *(f"--platform=manylinux_2_{minor}_aarch64" for minor in _GLIBC), "--python-version=3.12",
        "-d", str(setting.folder / name), *more, base.removeprefix("pypi:"),
    )  # fmt: skip
    return _command(*words)


def first(setting: Setting) -> Iterable[Subject]:
    """The first command on a machine: one run, from empty caches."""
    if setting.quick:  # a gigabyte of downloads
        return
    subject = Subject(
        title="The first command, from empty caches",
        about="an image with its proof, beside the download of vLLM's wheel alone; one run each",
    )
    for tool, command in setting.tools().items():
        empty = setting.folder / f"empty {tool}"
        cache = {"SPARK_BUILD_CACHE": str(empty / "own"), "UV_CACHE_DIR": str(empty / "uv")}
        words = ("image", "-l", "b12x-full", "-b", BASE, "--output", setting.image_of(tool))
        subject.add(f"{tool} image, with its proof", [_command(command, *words, env=cache)()])
    subject.add(
        "pip download, no cache", [_pip_download(setting, "none", BASE, "--no-cache-dir")()]
    )
    yield subject


def push(setting: Setting) -> Iterable[Subject]:
    """A patched image into a registry, and what it takes to know the base."""
    sizes = FEW if setting.quick else SIZES
    measured = registry_push.measured(
        1 if setting.quick else setting.rounds, sizes, setting.tools()
    )
    for size in sizes:
        base = f"base of {measured.real[size] / 1e9:.2f} GB"
        subject = Subject(
            title=f"Push one changed file, {base}",
            about="a registry on this machine; every result is read back",
        )
        for way in measured.ways:
            if runs := way.runs.get(size):
                subject.add(way.name, runs)
            else:
                subject.missing[way.name] = way.problem or "no whole round"
        yield subject
        knowing = Subject(title=f"Know a {base}", about="a plan, without a build")
        for name, runs in measured.knowing[size].items():
            knowing.add(name, runs)
        yield knowing


def build(setting: Setting) -> Iterable[Subject]:
    """On a base in a Docker Engine, against a Dockerfile by hand."""
    samples, added = image_build.measured(setting.rounds)
    said = ", ".join(f"{name} adds {size / 1e6:.0f} MB" for name, size in added.items())
    subject = Subject(title="Build on a base that is present", about=f"BuildKit for both; {said}")
    for name in sorted(samples, key=lambda name: name != image_build.OURS):
        subject.add(name.strip(), samples[name])
    yield subject


def diagnose(setting: Setting) -> Iterable[Subject]:
    """Logs of a server, against what only reads them."""
    for about, text in diagnose_log.logs(1000 if setting.quick else 100_000).items():
        log = setting.folder / "server.log"
        log.write_text(text)
        subject = Subject(title=f"Diagnose a log of {len(text) / 1e6:.0f} MB", about=about)
        yield _in_turn(
            subject,
            {
                **_of_each(setting, "diagnose", ["diagnose", str(log)]),
                "grep -cE 'error|fail|warn'": _command("grep", "-cE", "error|fail|warn", str(log)),
                "wc -l": _command("wc", "-l", str(log)),
            },
            setting.rounds,
        )


SUBJECTS: Mapping[str, Callable[[Setting], Iterable[Subject]]] = {
    "start": start,
    "warm": warm,
    "first": first,
    "push": push,
    "build": build,
    "diagnose": diagnose,
}


# --------------------------------------------------------------------------------------- the result


def machine_of(load: Sequence[float]) -> dict[str, Any]:
    """The machine, and its load before and after."""
    return {
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "load": [round(value, 1) for value in load],
    }


def document(subjects: Sequence[Subject], machine: Mapping[str, Any]) -> dict[str, Any]:
    """All runs, as JSON."""
    return {"schema": 1, "machine": machine, "subjects": [vars(subject) for subject in subjects]}


def table(subject: Subject) -> list[dict[str, str]]:
    """A row for each way: median and range of seconds, processor seconds, and bytes received."""
    rows = []
    base = next(iter(subject.spread("seconds")), {"seconds": [0, 1, 0]})["seconds"][1]
    cpu = {row["name"]: row["cpu"] for row in subject.spread("cpu")}
    received = {row["name"]: row["received"] for row in subject.spread("received")}
    for row in subject.spread("seconds"):
        least, middle, most = row["seconds"]
        got = received.get(row["name"])
        rows.append(
            {
                "name": row["name"],
                "seconds": f"{middle:.2f} ({least:.2f} to {most:.2f})",
                "ratio": f"{middle / base:.2f}",
                "cpu": f"{cpu[row['name']][1]:.2f}",
                "received": f"{got[1] / 1e6:,.2f} MB" if got else "",
            }
        )
    return rows


def page(subjects: Sequence[Subject], machine: Mapping[str, Any]) -> str:
    """One page: a plot and a table for each subject."""
    folders = [Path(__file__).parent, package_file("data")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [
        {
            "subject": subject,
            "plot": Markup(_plot(subject)),  # our own, with escaped names
            "rows": table(subject),
        }
        for subject in subjects
        if subject.ways
    ]
    return environment.get_template("page.html.j2").render(shown=shown, machine=machine) + "\n"


def _plot(subject: Subject) -> str:
    """Least, median and most seconds of each way."""
    return plot(
        subject.spread("seconds"),
        [("seconds", "Seconds")],
        "Small to large dot: least, median and most. Logarithmic scale.",
        f"{subject.title}: seconds of each way",
    )


def run(names: Sequence[str], setting: Setting) -> tuple[list[Subject], list[str]]:
    """Measure; gives the subjects, and the names of those that failed."""
    subjects: list[Subject] = []
    failed = []
    for name in names:
        began = time.monotonic()
        try:
            found = list(SUBJECTS[name](setting))
        except Exception as error:
            failed.append(name)
            shown = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
            text = shown.decode(errors="replace") if isinstance(shown, bytes) else str(shown)
            print(f"{name}: failed: {text.strip()[-600:]}", file=sys.stderr, flush=True)
            continue
        subjects += found
        took = "" if setting.quick else f" in {time.monotonic() - began:.0f} s"
        print(f"{name}: {sum(len(one.ways) for one in found)} ways ran{took}", flush=True)
        for subject in found:
            for way, why in subject.missing.items():
                print(f"  not run: {way}: {why}", flush=True)
    return subjects, failed


def write(subjects: Sequence[Subject], machine: Mapping[str, Any], out: Path) -> None:
    """Print the medians, and write all runs and the page."""
    for subject in subjects:
        print(f"\n{subject.title}: {subject.about}")
        for row in table(subject):
            print(f"  {row['name']:<46}{row['seconds']:>28}{row['ratio']:>9}{row['cpu']:>9}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmarks.json").write_text(json.dumps(document(subjects, machine), indent=1) + "\n")
    (out / "benchmarks.html").write_text(page(subjects, machine), "utf-8")
    print(f"\nwritten: {out.resolve()}/benchmarks.html and .json")


def main(words: Sequence[str] | None = None) -> int:
    """Measure and report; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(SUBJECTS), help="subjects, with commas")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--quick", action="store_true", help="for errors only: no figures")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for what is written")
    parser.add_argument(
        "--earlier", metavar="COMMAND", help="another spark-build, in the same turns"
    )
    given = parser.parse_args(words)
    names = given.only.split(",")
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"no subject {', '.join(unknown)}; subjects: {', '.join(SUBJECTS)}")
    load = os.getloadavg()[:1]
    with tempfile.TemporaryDirectory() as folder:
        rounds = 1 if given.quick else given.rounds
        setting = Setting(rounds, given.quick, Path(folder), given.earlier)
        subjects, failed = run(names, setting)
    if not given.quick and subjects:
        write(subjects, machine_of([*load, os.getloadavg()[0]]), given.out)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
