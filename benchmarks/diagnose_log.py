"""What reading a log costs: ``python -m benchmarks.diagnose_log``.

A busy server's log, from a file and through a pipe, against ``wc -l`` of the same file; and a log
of twice the size, which must take about twice as long.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import report, run_once, side_by_side

COMMAND = str(Path(sys.executable).with_name("spark-build"))
_START = "(APIServer pid=1) INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.33.0\n"
_READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
_WORDS = ("prefill", "decode", "block", "cache", "queue", "batch", "token", "graph", "slot", "rank")


def log(lines: int) -> str:
    """A log whose lines differ in words, so that none can be passed over."""
    chance = random.Random(1)
    text = [_START, _READY]
    for number in range(lines):
        words = " ".join(chance.choices(_WORDS, k=9))
        text.append(f"(EngineCore pid=9) INFO 06-01 10:00:00 [core.py:{number % 90}] {words}\n")
        if number % 50 == 0:
            text.append(f"(APIServer pid=1) ERROR 06-01 10:00:00 [serving.py:1] {words} failed\n")
    return "".join([*text, _READY])


def main(rounds: int = 5) -> None:
    """Run all."""
    with tempfile.TemporaryDirectory() as folder:
        once, twice = Path(folder) / "once.log", Path(folder) / "twice.log"
        once.write_text(log(100_000))
        twice.write_text(log(200_000))
        piped = f"cat {once} | {COMMAND} diagnose -"
        samples = side_by_side(
            {
                "wc -l": lambda: run_once(["wc", "-l", str(once)]),
                "diagnose FILE": lambda: run_once([COMMAND, "diagnose", str(once)]),
                "diagnose - (a pipe)": lambda: run_once(["sh", "-c", piped]),
                "diagnose FILE, twice the size": lambda: run_once(
                    [COMMAND, "diagnose", str(twice)]
                ),
            },
            rounds,
        )
        report(f"a log of {once.stat().st_size / 1e6:.0f} MB", samples)


if __name__ == "__main__":
    main()
