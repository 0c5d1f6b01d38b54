"""Level ``serve``: ``vllm serve`` of a tiny NVFP4 model logs the expected lines, and answers.

Standard library only, and whatever ``vllm`` the image has.  The model is generated: no download.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.probes import log_watch, serve_bench, serve_client, tiny_model, verify_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEVEL = "serve"
#: Seconds until the server must be ready: FlashInfer compiles kernels that the image lacks, torch
#: compiles the model, CUDA graphs are captured.
READY_TIMEOUT = 1200.0
ANSWER_TIMEOUT = 180.0
#: Seconds for the server to end by itself.
STOP_TIMEOUT = 60.0
PROGRESS = 15.0
#: Seconds between two checks of a server that starts or ends.
LOOK = 0.2
TOKENS = 16
#: Flags for the tiny models that no profile sets: little memory, short sequences.
TINY_FLAGS = ("--max-model-len", "1024", "--gpu-memory-utilization", "0.1")
#: Nothing leaves the machine.
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

Json = dict[str, Any]


class Server:
    """A server process in its own group, with its log."""

    def __init__(self, command: list[str], watch: Any) -> None:
        self.watch, self.started = watch, time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **QUIET},
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed when the server is gone
            for line in self.process.stdout:
                self.watch.feed(line)

    def wait_ready(self, url: str, timeout: float, say: Callable[[str], None]) -> str:
        """Wait until it answers; return the reason if it cannot, else an empty text."""
        said = self.started
        while True:
            status, now = self.process.poll(), time.monotonic()
            if status is not None:
                self.reader.join(5)
                words = f"signal {-status}" if status < 0 else f"exit status {status}"
                return f"the server ended with {words} after {now - self.started:.0f} s"
            if serve_client.healthy(url):
                return ""
            if now - self.started > timeout:
                return f"not ready within {timeout:.0f} s"
            if now - said > PROGRESS:
                said = now
                say(f"  serve: {now - self.started:.0f} s: {self.watch.last(1)[:160]}")
            time.sleep(LOOK)

    def stop(self, timeout: float) -> tuple[bool, str]:
        """End it and all its processes; return whether it ended by itself, and how."""
        asked = time.monotonic()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        while self._alive() and time.monotonic() - asked < timeout:
            time.sleep(LOOK)
        clean = not self._alive()
        self._signal(signal.SIGKILL)
        status = self.process.wait()
        self.reader.join(5)
        took = time.monotonic() - asked
        if clean:
            return True, f"ended with {status} after {took:.1f} s, and no process is left"
        return False, f"had to be killed after {took:.1f} s"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _alive(self) -> bool:
        """Whether a process of the group runs; zombies do not count."""
        self.process.poll()
        group = str(self.process.pid)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[2] == group and fields[0] not in "ZX":
                    return True
        return False


def vllm_command() -> list[str]:
    """How this image starts vLLM: beside its interpreter, on PATH, or as a module."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    return [found] if found else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


class Subject:
    """One model to serve, and the required lines of its log."""

    def __init__(self, name: str, folder: str, plan: Json, *, extra: list[str], tiny: bool) -> None:
        self.name, self.folder, self.tiny = name, folder, tiny
        experts = name != "dense"
        flags = [*plan["serve_flags"], *(plan["moe_serve_flags"] if experts else [])]
        self.flags = [*(TINY_FLAGS if tiny else ()), *flags, *extra]
        # the layers of the user's own model are unknown: its lines are shown, not required
        kinds = ("nvfp4-linear", "nvfp4-moe") if experts else ("nvfp4-linear",)
        wanted = [e for e in plan["expect"] if e["kind"] in kinds]
        self.expected = {e["kind"]: e["line"] for e in wanted} if tiny else {}

    def command(self, port: int) -> list[str]:
        """The whole command line."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", self.name]
        return [*vllm_command(), "serve", self.folder, *where, *self.flags]


class Session:
    """One server from start to stop, and the checks that it gives."""

    def __init__(self, subject: Subject, data: Json, options: Json) -> None:
        self.subject, self.options = subject, options
        self.watch = log_watch.Watch(data["markers"], list(subject.expected.values()))
        self.checks: list[Json] = []

    def check(self, name: str, good: bool, expected: str, seen: str, reason: str = "") -> None:
        """Add a check of this model."""
        label = f"{self.subject.name} {name}"
        made = verify_checks.check(LEVEL, label, good, expected, seen, reason=reason)
        if self.command:
            made["where"] = self.command
        self.checks.append(made)

    def run(self) -> list[Json]:
        """Start, ask, read the log, stop."""
        port = serve_client.free_port()
        command = self.subject.command(port)
        self.command = shlex.join(command)
        verify_checks.say(f"  serve: {self.command}")
        expected = f"ready within {self.options['ready']:.0f} s"
        try:
            server = Server(command, self.watch)
        except OSError as error:
            self.check("starts", False, expected, f"{command[0]}: {error}")
            return self.checks
        url = f"http://127.0.0.1:{port}"
        try:
            trouble = server.wait_ready(url, self.options["ready"], verify_checks.say)
            took = time.monotonic() - server.started
            reason = self.watch.why() if trouble else ""
            self.check(
                "starts", not trouble, expected, trouble or f"ready after {took:.0f} s", reason
            )
            if not trouble:
                self.answer(url)
        finally:
            clean, words = server.stop(self.options["stop"])
        self.lines()
        if not trouble:
            self.check("stops", clean, "stops when asked to, with all its processes", words)
        return self.checks

    def answer(self, url: str) -> None:
        """One completion, and the bench if requested."""
        expected = f"{TOKENS} tokens with finite log probabilities"
        prompt = [1, *range(10, 41)]
        try:
            if self.subject.tiny:
                answer = serve_client.complete(
                    url, self.subject.name, prompt, TOKENS, self.options["answer"]
                )
                problems, seen = serve_client.judge(answer, TOKENS)
            else:
                problems, seen = serve_bench.chat(url, self.subject.name, self.options["answer"])
                expected = "an answer to a chat message"
        except serve_client.ServeError as error:
            self.check("answers", False, expected, str(error), self.watch.why())
            return
        self.check("answers", not problems, expected, "; ".join(problems) or seen)
        if self.options.get("bench"):
            self.checks += serve_bench.checks(
                url, self.subject.name, self.subject.tiny, self.options
            )

    def lines(self) -> None:
        """The checks of the log's lines."""
        for kind, line in self.subject.expected.items():
            seen = self.watch.found.get(line, "no such line")
            self.check(f"{kind} line", line in self.watch.found, line, seen)
        bad, odd = self.watch.shown("error"), self.watch.shown("warning")
        shown = [f"{marker['id']}: {line[:240]}" for marker, line in (bad or odd)]
        reason = " | ".join(f"{marker['message']} {marker['fix']}" for marker, _ in (bad or odd))
        words = "no known error" if not bad else "; ".join(shown)
        if odd and not bad:
            words += f", but: {'; '.join(shown)}"
        expected = (
            f"no line that matches one of {len(self.watch.markers)} known errors and warnings"
        )
        self.check("bad lines", not bad, expected, words, reason)


@contextlib.contextmanager
def subjects(plan: Json, options: Json) -> Iterator[list[Subject]]:
    """The generated models, or the caller's own."""
    extra = shlex.split(options.get("serve_args") or "")
    if options.get("model"):
        yield [Subject("model", options["model"], plan, extra=extra, tiny=False)]
        return
    with tempfile.TemporaryDirectory(prefix="spark-verify-") as scratch:
        made = []
        for variant in tiny_model.VARIANTS:
            folder = tiny_model.write(Path(scratch) / variant, variant)
            made.append(Subject(variant, str(folder), plan, extra=extra, tiny=True))
        yield made


def run(plan: Json, data: Json, options: Json, trouble: str) -> list[Json]:
    """All checks of the level; ``trouble`` is the reason if there is no GPU, else empty."""
    settings = {"ready": READY_TIMEOUT, "answer": ANSWER_TIMEOUT, "stop": STOP_TIMEOUT, **options}
    if trouble:
        reason = f"no GPU here: {trouble}; on the Spark: {data['command']}"
        names = ["model"] if options.get("model") else list(tiny_model.VARIANTS)
        return [verify_checks.not_run(LEVEL, f"{n} starts", "vllm serve", reason) for n in names]
    checks: list[Json] = []
    with subjects(plan, options) as listed:
        for subject in listed:
            checks += Session(subject, data, settings).run()
    if options.get("against"):
        other = json.loads(Path(options["against"]).read_text("utf-8"))
        checks += serve_bench.compare(checks, other, options["against"])
    return checks
