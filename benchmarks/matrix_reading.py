"""What ``matrix`` reads and takes, beside ``pip download`` and unpacking of the same wheels.

    python -m benchmarks.matrix_reading [RELEASE...] [--layers L[,L...]] [--rounds N] [--json FILE]

The ways take turns.  ``cold`` starts with an empty cache, ``warm`` is the same command again, and
``offline`` again with a proxy at which nobody listens.  pip gets the wheels of vLLM and of the
packages that the layers change, at the versions that the matrix names, each release into a folder
of its own.  Bytes are those on the disk afterwards; memory is the most that one process took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.layers.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

COMMAND = str(Path(sys.executable).with_name("spark-build"))
RELEASES = ("0.20.1", "0.22.1", "0.33.0")
#: A proxy that refuses: the discard port of this machine.
NOBODY = "http://127.0.0.1:9"
#: What pip takes for the DGX Spark: arm64, a glibc of 2.17 to 2.39, CPython 3.12.
TARGET = [
    "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp",
    "--abi=cp312", "--abi=abi3", "--abi=none", "--platform=any",
    *(f"--platform=manylinux_2_{minor}_aarch64" for minor in range(39, 16, -1)),
]  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """One run of one way: seconds, processor seconds, bytes on disk, bytes of memory."""

    seconds: float
    cpu: float
    disk: int
    memory: int


def costs(
    commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str] | None = None
) -> tuple[Cost, str]:
    """Run commands one after another; their cost, and what the last one printed.

    Raises:
        CalledProcessError: one of them failed, so their time means nothing.
    """
    began, cpu, memory, text = time.perf_counter(), 0.0, 0, ""
    for words in commands:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                words, stdout=out, stderr=said, env={**os.environ, **(env or {})}
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            said.seek(0)
            text = out.read().decode()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, words, text, said.read())
        cpu += usage.ru_utime + usage.ru_stime
        memory = max(memory, usage.ru_maxrss << 10)  # Linux counts in KiB
    disk = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    return Cost(time.perf_counter() - began, cpu, disk, memory), text


def wheels(
    document: Mapping[str, object], layers: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """The requirements of each release: vLLM and the packages that the layers change."""
    catalog = Catalog.discover()
    changed = dict.fromkeys(["vllm", *(catalog.layer(name).package for name in layers)])
    for row in document["rows"]:  # type: ignore[attr-defined]
        packages = row["packages"]
        yield row["vllm"], [f"{name}=={packages[name]}" for name in changed if name in packages]


def one_round(releases: Sequence[str], names: str, folder: Path) -> dict[str, Cost]:
    """Each way once."""
    cache = folder / "cache"
    words = [COMMAND, "matrix", "-l", names, "--releases", ",".join(releases), "--json"]
    env = {"SPARK_BUILD_CACHE": str(cache)}
    silent = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), NOBODY)
    found: dict[str, Cost] = {}
    found["matrix, cold"], text = costs([words], cache, env)
    found["matrix, warm"], again = costs([words], cache, env)
    found["matrix, offline"], alone = costs([words], cache, {**env, **silent, "NO_PROXY": ""})
    assert text == again == alone, "the answers differ"
    document = json.loads(text)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-cache-dir", *TARGET]
    wanted = list(wheels(document, document["layers"]))
    files = folder / "wheels"
    downloads = [[*pip, "-d", str(files / v), *needs] for v, needs in wanted]
    found["pip download"], _ = costs(downloads, files)
    unzips = [
        [
            sys.executable,
            "-m",
            "zipfile",
            "-e",
            str(wheel),
            str(folder / "trees" / wheel.parent.name),
        ]
        for wheel in sorted(files.rglob("*.whl"))
    ]
    found["unzip"], _ = costs(unzips, folder / "trees")
    return found


def report(rounds: Sequence[Mapping[str, Cost]], say: Callable[[str], object] = print) -> None:
    """Print medians, and the ratio to downloading and unzipping, round by round."""
    say(f"{'':<18}{'s':>8}{'cpu s':>8}{'MB disk':>9}{'MB mem':>8}{'time':>8}{'bytes':>8}")
    for name in rounds[0]:
        each = [one[name] for one in rounds]
        whole = [one["pip download"].seconds + one["unzip"].seconds for one in rounds]
        got = [one["pip download"].disk for one in rounds]
        time_ratio = statistics.median(c.seconds / w for c, w in zip(each, whole, strict=True))
        byte_ratio = statistics.median(c.disk / g for c, g in zip(each, got, strict=True))
        say(
            f"{name:<18}{statistics.median(c.seconds for c in each):>8.1f}"
            f"{statistics.median(c.cpu for c in each):>8.1f}"
            f"{statistics.median(c.disk for c in each) / 1e6:>9.1f}"
            f"{statistics.median(c.memory for c in each) / 1e6:>8.0f}"
            f"{time_ratio:>8.3f}{byte_ratio:>8.3f}"
        )
    say("time: beside pip download and unzip together; bytes: beside what pip downloads")


def main() -> None:
    """Run the rounds, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--layers", default="b12x-full")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rounds = []
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as name:
            rounds.append(one_round(given.releases, given.layers, Path(name)))
        print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
    report(rounds)
    if given.json:
        plain = [{name: asdict(cost) for name, cost in one.items()} for one in rounds]
        given.json.write_text(json.dumps(plain, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
