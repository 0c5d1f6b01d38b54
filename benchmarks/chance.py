"""What is decided by chance: commands run again and again from empty caches, and compared.

``python -m benchmarks.chance [--rounds 20] [--with uv,pip] [--busy N] [--work DIR]``

Each round begins with an empty cache, also of the installer, and runs the main job and one
preflight of the README with ``--json``.  All documents of a command must be the same byte for byte,
but for times, with either installer.  ``--busy`` starts processes beside it that only use the
processors.
Exit 1 where two documents differ, or a command fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.meter import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: The two commands of the README, by name.
COMMANDS = {
    "image": ("image", "--layers", "b12x-full", "--json"),
    "preflight": (
        "preflight", "qwen3-30b-a3b", "--release", "0.33.0", "--layers", "b12x-full", "--json",
    ),
}  # fmt: skip
#: spark-build, without a uv where ``sys.argv[1]`` is pip.
_START = (
    "import sys; from builder.proof import isolation; how = sys.argv.pop(1)\n"
    "if how == 'pip': isolation.uv = lambda: None\n"
    "sys.argv[0] = 'spark-build'; from builder.__main__ import run; sys.exit(run())"
)
INSTALLERS = ("uv", "pip")
#: A moment, and the keys of durations.
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_DURATIONS = ("seconds", "took", "duration", "timings")


@dataclass(frozen=True)
class Ran:
    """One run of a command."""

    round: int
    installer: str
    command: str
    code: int
    seconds: float
    cpu: float
    #: of its document without times
    sha256: str
    #: what was told of damaged folders
    made_again: int

    def row(self) -> str:
        """Its row of the table."""
        cells = (
            str(self.round), self.installer, self.command, str(self.code), f"{self.seconds:.0f}",
            f"{self.cpu:.0f}", self.sha256[:12], str(self.made_again),
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| round | installer | command | exit | wall s | CPU s | document | made again |\n"
    "|---|---|---|---|---|---|---|---|"
)


def without_times(value: Any) -> Any:
    """A document without what differs from run to run by design."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in _DURATIONS}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return _MOMENT.sub("TIME", value) if isinstance(value, str) else value


def run_command(number: int, installer: str, name: str, work: Path) -> Ran:
    """Run a command in an empty folder, with the cache of its round; keep its document."""
    cwd = work / "cwd"
    shutil.rmtree(cwd, ignore_errors=True)
    cwd.mkdir()
    env = {
        **ENVIRONMENT, "SPARK_BUILD_CACHE": f"{work}/cache", "UV_CACHE_DIR": f"{work}/cache/uv",
        "PIP_CACHE_DIR": f"{work}/cache/pip", "HF_HOME": f"{work}/cache/hf",
        "PYTHONPATH": str(Path(__file__).parents[1]), "SPARK_BUILD_SERVER_IDLE": "0",
    }  # fmt: skip
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-c", _START, installer, *COMMANDS[name]]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        document = without_times(json.loads(done.stdout))
    except ValueError:
        document = {"no document": done.stdout, "stderr": done.stderr}
    text = json.dumps(document, sort_keys=True, indent=1)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    kept = work / f"{name}-{sha256[:12]}.json"
    kept.write_text(text)
    kept.with_suffix(".log").write_text(done.stderr)
    return Ran(
        round=number, installer=installer, command=name, code=done.returncode, seconds=seconds,
        cpu=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, sha256=sha256,
        made_again=done.stderr.count("made again"),
    )  # fmt: skip


def rounds(number: int, installers: Sequence[str], work: Path) -> Iterator[Ran]:
    """All runs; the cache is removed after each round."""
    for one in range(1, number + 1):
        installer = installers[(one - 1) % len(installers)]
        try:
            for name in COMMANDS:
                yield run_command(one, installer, name, work)
        finally:
            shutil.rmtree(work / "cache", ignore_errors=True)


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Some processes that only use the processors."""
    words = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(words) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(words: Sequence[str] | None = None) -> int:
    """Run the rounds and print the table; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chance", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--with", dest="installers", default=",".join(INSTALLERS))
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder for caches and documents")
    given = parser.parse_args(words)
    installers = given.installers.split(",")
    if unknown := [name for name in installers if name not in INSTALLERS]:
        parser.error(f"no installer {', '.join(unknown)}; installers: {', '.join(INSTALLERS)}")
    work = given.work or Path(tempfile.mkdtemp(prefix="spark-build-chance-"))
    work.mkdir(parents=True, exist_ok=True)
    documents: dict[str, set[str]] = {name: set() for name in COMMANDS}
    failed = 0
    print(HEADER, flush=True)
    with busy(given.busy):
        for ran in rounds(given.rounds, installers, work.absolute()):
            documents[ran.command].add(ran.sha256)
            failed += ran.code != 0
            print(ran.row(), flush=True)
    for name, found in documents.items():
        print(f"{name}: {len(found)} different documents, in {work}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {failed} commands failed")
    return 1 if failed or any(len(found) > 1 for found in documents.values()) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
