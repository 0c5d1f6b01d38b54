"""Level ``serve``: ``vllm serve`` of a tiny NVFP4 model: its log, its answers, its speed.

Standard library only, and whatever ``vllm`` the image has.  The model is generated: no download.
Lines that are not allowed come from the catalogue of ``spark-build diagnose``: those that apply to
this image's release, with their fixes (``device.json``).

Speed is tokens a second and time to the first token, at concurrency 1 to 16.  Each round sends as
many requests at once as the concurrency says, 200 tokens each, temperature 0, and divides the
tokens by the time until the last has ended; of three rounds after a warm-up the median counts.
Over HTTP, streamed, tokens from the server's own usage.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
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

from builder.probes import serve_client, tiny_model, verify_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# --------------------------------------------------------------------------------- the server's log

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: Lines stored for the evidence if something fails.
TAIL = 40
#: Lines stored from the first sign of a failure on: a traceback of the engine, and its causes.
FAILING = 160
_SIGNS = ("Traceback (most recent call last)", "Error: ", "Fatal Python error", "terminate called")
Json = dict[str, Any]


class Watch:
    """The state of a log; lines are fed one by one."""

    def __init__(self, markers: list[Json], expected: list[str]) -> None:
        self.markers = [
            (m, [re.compile(p) for p in m["patterns"]], [re.compile(p) for p in m["unless"]])
            for m in markers
        ]
        conditions = {p for m in markers for p in (*m["with"], *m["without"])}
        self.conditions = {source: re.compile(source) for source in conditions}
        self.present: set[str] = set()
        self.hits: dict[str, str] = {}
        self.found: dict[str, str] = {}
        self.expected = expected
        self.failing: list[str] = []
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)

    def feed(self, raw: str) -> None:
        """Read one line."""
        line = ANSI.sub("", raw).rstrip()
        if not line:
            return
        self.tail.append(line)
        if not self.failing and any(sign in line for sign in _SIGNS):
            self.failing = list(self.tail)[-4:]
        elif 0 < len(self.failing) < FAILING:
            self.failing.append(line)
        for text in self.expected:
            if text in line:
                self.found.setdefault(text, line)
        for source, regex in self.conditions.items():
            if source not in self.present and regex.search(line):
                self.present.add(source)
        for marker, patterns, unless in self.markers:
            if marker["id"] in self.hits or not any(p.search(line) for p in patterns):
                continue
            if not any(regex.search(line) for regex in unless):
                self.hits[marker["id"]] = line

    def shown(self, severity: str) -> list[tuple[Json, str]]:
        """Matched markers of a severity, with the line of each."""
        return [
            (marker, self.hits[marker["id"]])
            for marker, _, _ in self.markers
            if marker["id"] in self.hits
            and marker["severity"] == severity
            and self.present.issuperset(marker["with"])
            and self.present.isdisjoint(marker["without"])
        ]

    def why(self) -> str:
        """The log from its first failure on, or its end if there is none."""
        return "\n".join(self.failing) or self.last(20)

    def last(self, count: int = 12) -> str:
        """The end of the log."""
        return "\n".join(list(self.tail)[-count:])


# ---------------------------------------------------------------------------------------- its speed

LEVEL = "serve"
#: Ratios below this are slower, above its inverse faster: rounds of one server differ by a few
#: per cent.
NOTABLE = 0.97


def measure(
    url: str,
    model: str,
    tiny: bool,
    options: Json,
    concurrency: Sequence[int] = serve_client.CONCURRENCY,
) -> Iterator[Json]:
    """One row for each concurrency.

    Raises:
        ServeError: a request fails.
    """
    tokens, rounds = (
        int(options.get("tokens", serve_client.TOKENS)),
        int(options.get("rounds", serve_client.ROUNDS)),
    )

    def one(number: int) -> Any:
        path, body = serve_client.request_of(model, tiny, number, tokens)
        return serve_client.stream(url, path, body, options["answer"])

    for row in serve_client.measure(one, concurrency, rounds):
        if row["failures"]:
            raise serve_client.ServeError(row["failures"][0])
        yield row


#: The two figures: the name of their check, and their key in a row.
SPEED, FIRST = "tokens/s", "first token, ms"
COLUMNS = {SPEED: "tokens_per_second", FIRST: "first_token_ms"}


def checks(url: str, model: str, tiny: bool, options: Json) -> list[Json]:
    """The bench as two checks with their figures."""
    steps = ", ".join(map(str, serve_client.CONCURRENCY))
    expected = f"{serve_client.TOKENS} tokens a request, concurrency {steps}"
    rows = []
    try:
        for row in measure(url, model, tiny, options):
            rows.append(row)
            speed, first = row["tokens_per_second"], row["first_token_ms"]
            count = row["concurrency"]
            verify_checks.say(
                f"  bench: {count:>2} at once: {speed:.1f} tokens/s, first after {first:.0f} ms"
            )
    except serve_client.ServeError as error:
        return [verify_checks.check(LEVEL, f"{model} {SPEED}", False, expected, str(error))]
    speeds = []
    for name, column in COLUMNS.items():
        figures = {f"at {row['concurrency']}": row[column] for row in rows}
        seen = ", ".join(f"{value:g} {key}" for key, value in figures.items())
        speeds.append(
            verify_checks.check(LEVEL, f"{model} {name}", True, expected, seen, figures=figures)
        )
    return speeds


def chat(url: str, model: str, timeout: float) -> tuple[list[str], str]:
    """The problem of an answer of the user's own model, and its beginning.

    Raises:
        ServeError: there is none.
    """
    body = {"model": model, "max_tokens": 64, "temperature": 0}
    body["messages"] = [{"role": "user", "content": serve_client.PROMPT}]
    try:
        with serve_client.post(url, "/v1/chat/completions", body, timeout) as answer:
            message = json.load(answer)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise serve_client.ServeError(f"no answer to a chat message: {error!r}") from None
    text = str(message.get("content") or message.get("reasoning_content") or "")
    if not text.strip():
        return ["an empty answer"], ""
    if re.fullmatch(r"(.)\1{15,}", text.strip(), re.DOTALL):
        return [f"one character over and over: {text.strip()[:16]}"], ""
    return [], " ".join(text.split())[:120]


# --- two measurements side by side -------------------------------------------------------------


def kernels_in(checks: Sequence[Json]) -> str:
    """The selected kernels of an evidence document, in a few words."""
    text = " ".join(str(c["seen"]) for c in checks if c["status"] == "pass")
    pairs = re.findall(r"Using (\S+) for NVFP4 GEMM|Using '(\w+)' NvFp4 MoE", text)
    names = dict.fromkeys((a or b).removeprefix("NvFp4LinearBackend.") for a, b in pairs)
    return ", ".join(names) or "unknown kernels"


def compare(own: Sequence[Json], other: Json, name: str) -> list[Json]:
    """This bench divided by another one, row by row; marks where this one is slower."""
    theirs = {c["name"]: c.get("figures") or {} for c in other.get("checks", [])}
    mine, yours = kernels_in(own), kernels_in(other.get("checks", []))
    expected = f"figures of {name} to divide by"
    checks = []
    for check in own:
        label = check["name"]
        if check["status"] != "pass" or not label.endswith(tuple(COLUMNS)):
            continue
        figures = theirs.get(label, {})
        ratios = {
            key: round(value / figures[key], 3)
            for key, value in check["figures"].items()
            if figures.get(key)
        }
        if not ratios:
            reason = f"{name} holds no figures of '{label}'"
            checks.append(verify_checks.not_run(LEVEL, f"{label}, compared", expected, reason))
            continue
        seen = verdict(ratios, mine, yours, more_is_better=label.endswith(SPEED))
        checks.append(
            verify_checks.check(LEVEL, f"{label}, compared", True, expected, seen, figures=ratios)
        )
    if not checks:
        reason = "no benchmark of this run finished"
        checks.append(verify_checks.not_run(LEVEL, "bench, compared", expected, reason))
    return checks


def verdict(ratios: dict[str, float], mine: str, yours: str, *, more_is_better: bool) -> str:
    """The ratios in words."""
    gains = {key: r if more_is_better else 1 / r if r else 0.0 for key, r in ratios.items()}
    slower = [key for key, gain in gains.items() if gain < NOTABLE]
    faster = [key for key, gain in gains.items() if gain > 1 / NOTABLE]
    parts = []
    if slower:
        parts.append(f"SLOWER than {yours} {', '.join(slower)}")
    if faster:
        parts.append(f"faster than {yours} {', '.join(faster)}")
    listed = ", ".join(f"{ratio:.2f}x {key}" for key, ratio in ratios.items())
    return f"{mine} is {' and '.join(parts) or f'as fast as {yours}'} ({listed})"


# --------------------------------------------------------------------------------------- the server

#: Seconds until the server must be ready: FlashInfer compiles kernels that the image lacks, torch
#: compiles the model, CUDA graphs are captured.
READY_TIMEOUT = 1200.0
ANSWER_TIMEOUT = 180.0
#: Seconds for the server to end by itself.
STOP_TIMEOUT = 60.0
PROGRESS = 15.0
#: Seconds between two checks of a server that starts or ends.
LOOK = 0.2
ANSWER_TOKENS = 16
#: Flags for the tiny models that no profile sets: little memory, short sequences.
TINY_FLAGS = ("--max-model-len", "1024", "--gpu-memory-utilization", "0.1")
#: Nothing leaves the machine.
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


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
        reported = self.started
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
            if now - reported > PROGRESS:
                reported = now
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
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    return [program] if program else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


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
        self.watch = Watch(data["markers"], list(subject.expected.values()))
        self.checks: list[Json] = []

    def check(self, name: str, good: bool, expected: str, seen: str, reason: str = "") -> None:
        """Add a check of this model."""
        label = f"{self.subject.name} {name}"
        check = verify_checks.check(LEVEL, label, good, expected, seen, reason=reason)
        if self.command:
            check["where"] = self.command
        self.checks.append(check)

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
        expected = f"{ANSWER_TOKENS} tokens with finite log probabilities"
        prompt = [1, *range(10, 41)]
        try:
            if self.subject.tiny:
                answer = serve_client.complete(
                    url, self.subject.name, prompt, ANSWER_TOKENS, self.options["answer"]
                )
                problems, seen = serve_client.judge(answer, ANSWER_TOKENS)
            else:
                problems, seen = chat(url, self.subject.name, self.options["answer"])
                expected = "an answer to a chat message"
        except serve_client.ServeError as error:
            self.check("answers", False, expected, str(error), self.watch.why())
            return
        self.check("answers", not problems, expected, "; ".join(problems) or seen)
        if self.options.get("bench"):
            self.checks += checks(url, self.subject.name, self.subject.tiny, self.options)

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
        models = []
        for variant in tiny_model.VARIANTS:
            folder = tiny_model.write(Path(scratch) / variant, variant)
            models.append(Subject(variant, str(folder), plan, extra=extra, tiny=True))
        yield models


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
        checks += compare(checks, other, options["against"])
    return checks
