"""A ``vllm`` that serves nothing: it logs, listens and answers as its orders say.

    python fake_vllm.py ORDERS.json serve MODEL --port N ...

Orders: ``lines`` to log before it listens, ``exit`` (status, or a negative signal) instead of
listening, ``ready`` (seconds until it listens, null for never), ``answer`` (``good``, ``nan``,
``inf``, ``zeros``, ``short``, ``error``, ``garbage``, ``hang``), ``stop`` (``clean``, ``ignore``,
``orphan``: leaves a child), ``late`` lines after it is ready, ``delay`` seconds a token.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ORDERS: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())


def completion(body: dict[str, Any]) -> str:
    """A completion in vLLM's form."""
    count = body["max_tokens"]
    how = ORDERS.get("answer", "good")
    words = ["t0" if how == "zeros" else f"t{5 + i}" for i in range(count)]
    odd = {"nan": float("nan"), "inf": float("-inf")}.get(how, -7.5)
    if how == "short":
        words = words[:2]
    logprobs = {"tokens": words, "token_logprobs": [odd] * len(words)}
    choice = {"text": " ".join(words), "logprobs": logprobs}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": len(words)}})


class Handler(BaseHTTPRequestHandler):
    """Health, completions, and streams of them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def send(self, text: str, status: int = 200) -> None:
        """A whole answer."""
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Health."""
        self.send("")

    def do_POST(self) -> None:
        """Answer as ordered."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Path(sys.argv[1]).with_suffix(".requests").open("a").write(json.dumps(body) + "\n")
        how = ORDERS.get("answer", "good")
        if how == "hang":
            time.sleep(60)
        elif how == "error":
            self.send('{"message": "Out of range float values are not JSON compliant"}', 500)
        elif how == "garbage":
            self.send("<html>")
        elif body.get("stream"):
            self.stream(body)
        elif "messages" in body:
            text = "!" * 40 if how == "zeros" else "A heat pump moves heat."
            self.send(json.dumps({"choices": [{"message": {"content": text}}]}))
        else:
            self.send(completion(body))

    def stream(self, body: dict[str, Any]) -> None:
        """Tokens one by one, then their number."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(body["max_tokens"]):
            time.sleep(ORDERS.get("delay", 0))
            event = {"choices": [{"text": f"t{number}", "delta": {"content": "x"}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True


class Server(ThreadingHTTPServer):
    """Threads end with the process."""

    daemon_threads = True


def main() -> int:
    """Play the server."""
    arguments = sys.argv[2:]
    Path(sys.argv[1]).with_suffix(".arguments").write_text(json.dumps(arguments))
    for line in ORDERS.get("lines", ()):
        print(line, file=sys.stderr, flush=True)
    status = ORDERS.get("exit")
    if status is not None:
        if status < 0:
            os.kill(os.getpid(), -status)
        return int(status)
    if ORDERS.get("stop") == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif ORDERS.get("stop") == "orphan":
        ignore = "import signal, time; signal.signal(15, signal.SIG_IGN)"
        source = f"{ignore}; print(flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if ORDERS.get("ready", 0) is None:
        time.sleep(600)
    time.sleep(ORDERS.get("ready", 0))
    port = int(arguments[arguments.index("--port") + 1])
    server = Server(("127.0.0.1", port), Handler)
    for line in ORDERS.get("late", ()):
        print(line, flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
