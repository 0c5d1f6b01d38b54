"""Side-by-side timing: the alternatives take turns, so that a noisy machine is noisy for all."""

from __future__ import annotations

import resource
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.meter import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class Sample:
    """One run: wall and processor seconds."""

    wall: float
    cpu: float


def run_once(command: Sequence[str], env: Mapping[str, str] | None = None) -> Sample:
    """Run a command to its end.

    Raises:
        subprocess.CalledProcessError: it failed, so its time means nothing.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    env = ENVIRONMENT if env is None else env
    subprocess.run(command, env=env, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall, cpu)


def side_by_side(
    alternatives: Mapping[str, Callable[[], Sample]], rounds: int
) -> dict[str, list[Sample]]:
    """Run each alternative once per round, in turn, after one round that is not counted."""
    samples: dict[str, list[Sample]] = {name: [] for name in alternatives}
    for number in range(rounds + 1):
        for name, alternative in alternatives.items():
            sample = alternative()
            if number:
                samples[name].append(sample)
    return samples


def report(title: str, samples: Mapping[str, Sequence[Sample]]) -> None:
    """Print medians, and the ratio of each alternative to the first, round by round."""
    names = list(samples)
    first = samples[names[0]]
    print(f"\n{title}  ({len(first)} rounds, in turn)")
    print(f"  {'':<34}{'wall s':>8}{'cpu s':>8}{'wall ratio':>12}{'cpu ratio':>11}")
    for name in names:
        runs = samples[name]
        pairs = list(zip(runs, first, strict=True))
        wall = statistics.median(r.wall for r in runs)
        cpu = statistics.median(r.cpu for r in runs)
        wall_ratio = statistics.median(r.wall / f.wall for r, f in pairs)
        cpu_ratio = statistics.median(r.cpu / f.cpu for r, f in pairs if f.cpu)
        print(f"  {name:<34}{wall:>8.2f}{cpu:>8.2f}{wall_ratio:>12.2f}{cpu_ratio:>11.2f}")
