"""Logs of a busy server, for what ``diagnose`` costs."""

from __future__ import annotations

import random

_START = "(APIServer pid=1) INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.33.0\n"
_READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
_ALIVE = '(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
_ERROR = "(APIServer pid=1) ERROR 06-01 10:00:00 [serving.py:1] {} failed\n"
_WORDS = ("prefill", "decode", "block", "cache", "queue", "batch", "token", "graph", "slot", "rank")


def log(lines: int) -> str:
    """A log whose lines differ in words, so that none can be passed over."""
    chance = random.Random(1)
    text = [_START, _READY]
    for number in range(lines):
        words = " ".join(chance.choices(_WORDS, k=9))
        text.append(f"(EngineCore pid=9) INFO 06-01 10:00:00 [core.py:{number % 90}] {words}\n")
        if number % 50 == 0:
            text.append(_ERROR.format(words))
    return "".join([*text, _ALIVE])


def logs(lines: int) -> dict[str, str]:
    """Logs of about one size, by what is in them."""
    line = f"(EngineCore pid=9) INFO 06-01 10:00:00 [core.py:7] {' '.join(_WORDS)}\n"
    start = f"{_START}{_READY}{_ERROR.format(' '.join(_WORDS))}"
    return {
        "no two lines are the same": log(lines),
        "one line, again and again": f"{start}{line * lines}{_ALIVE}",
        "one long line": f"{start}{line.strip() * lines}\n{_ALIVE}",
    }
