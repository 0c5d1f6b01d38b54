"""Set spark-build up in a checkout, then run it: needs python3 and a package index, nothing else.

    python3 builder/bootstrap.py image --layers b12x-full    set up, then run that command
    python3 builder/bootstrap.py --test                      set up, then lint and run all tests
    python3 builder/bootstrap.py --test tests/unit -k name   set up, then run these with pytest
    python3 builder/bootstrap.py --test --changed [REF]      set up, then the tests near to a change

Standard library only; the environment is ``.venv`` in the checkout (or SPARK_BUILD_VENV).
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def say(message: str) -> None:
    """Talk goes to stderr: stdout belongs to the command."""
    print(message, file=sys.stderr, flush=True)


def fail(message: str) -> None:
    """End with a usage error."""
    say(f"error: {message}")
    raise SystemExit(2)


def ensure_venv_module() -> None:
    """Debian and Ubuntu split ensurepip off; install it where we may, else say how."""
    if importlib.util.find_spec("ensurepip") is not None:
        return
    package = f"python3.{sys.version_info.minor}-venv"
    if shutil.which("apt-get") is None:
        fail("this Python has no ensurepip; install its venv package, then run this again")
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    say(f"• installing {package}")
    code, output = 0, ""
    install = ["install", "-y", "--no-install-recommends", package]
    for words in (["update"], install):
        command = [*prefix, "apt-get", "-qq", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        code, output = done.returncode, done.stdout + done.stderr
    if code != 0:
        say(output)
        fail(f"could not install {package}; install it yourself, then run this again")


def run_quietly(command: list[str], *, apart: bool) -> None:
    """Run a program of the set-up, which says nothing of its own if Ctrl-C ends it.

    ``apart``: in a group of processes of its own, which ends with what it started.  Pip stays in
    ours, because it may ask for a password; it does not see Ctrl-C.

    Raises:
        CalledProcessError: the program exited non-zero.
    """
    # held back until there is a program to end: a Ctrl-C while it starts counts, too
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = subprocess.Popen(
            command,
            stdout=sys.stderr,
            process_group=0 if apart else None,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509
        )
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = child.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(-child.pid if apart else child.pid, signal.SIGTERM)
        child.wait()
        raise
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def environment() -> Path:
    """Where the checkout's virtual environment is, or will be."""
    return Path(os.environ.get("SPARK_BUILD_VENV", ROOT / ".venv"))


def set_up(*, dev: bool = False) -> Path:
    """Make or refresh the environment; gives its ``bin`` directory.

    Tests get the exact versions of the lock, users the ranges of ``pyproject.toml``.
    """
    venv = environment()
    stamp = venv / f"spark-build{'[dev]' if dev else ''}.stamp"
    lock = ROOT / "requirements-dev.lock"
    says = [ROOT / "pyproject.toml", *([lock] if dev else [])]
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in says)).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        ensure_venv_module()
        say(f"• setting up {venv}: about 160 MB of packages, once")
        if not (venv / "bin" / "pip").exists():
            run_quietly([sys.executable, "-m", "venv", str(venv)], apart=True)
        install = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q"]
        if dev:
            # the lock names everything; if pip resolves again, it meets newer releases, for a
            # package with an extra before it looks at the pin, and refuses them for want of a hash
            install.append("--no-deps")
            run_quietly([*install, "--require-hashes", "-r", str(lock)], apart=False)
        run_quietly([*install, "-e", str(ROOT)], apart=False)
        stamp.write_text(wanted)
    return venv / "bin"


#: What an ordinary user's pip may be told: where the index is, and how to reach it.
_ORDINARY_PIP = ("index-url", "cert", "client-cert", "proxy", "trusted-host", "timeout", "retries")


def use_ordinary_pip(folder: Path) -> None:
    """Let pip find packages as a user's pip does: on its index, nowhere else.

    A folder of wheels or a second index in this machine's configuration would give the tests what
    nobody else has, such as a CPU build of torch.
    """
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_EXTRA_INDEX_URL"):
        os.environ.pop(name, None)
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [Path.home() / ".pip" / "pip.conf", config / "pip" / "pip.conf"]
    named = os.environ.get("PIP_CONFIG_FILE")
    files += [Path(named)] if named and named != os.devnull else []
    configuration = configparser.RawConfigParser()
    configuration.read(files, encoding="utf-8")
    ordinary = configparser.RawConfigParser()
    settings = {
        k: v
        for s in configuration.sections()
        for k, v in configuration.items(s)
        if k in _ORDINARY_PIP
    }
    ordinary["global"] = settings
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "ordinary-pip.conf"
    partial = target.with_suffix(f".{os.getpid()}")
    with partial.open("w", encoding="utf-8") as stream:
        ordinary.write(stream)
    partial.replace(target)
    os.environ["PIP_CONFIG_FILE"] = str(target)  # pip then reads no file of the user's


#: Lanes that run side by side, as arguments of pytest.  That of the engine often waits for it, and
#: its base image is made while the first tests there run; in the next, fast tests come first.
_LANES = {
    "engine": ("tests/arm64", "tests/engine"),
    "machine": tuple(
        f"tests/{name}"
        for name in (
            "unit", "processes", "package", "compiled", "browser", "registry", "actions", "clients",
        )
    ),
    "wheels": ("tests/wheels", "--ignore=tests/wheels/kernels"),
    "kernels": ("tests/wheels/kernels",),
}  # fmt: skip

#: Tests that compile.
_COMPILING = ("tests/compiled", "tests/engine", "tests/wheels")


#: What a first run leaves in the caches, measured: wheels and sandboxes 9 GB, engine 11 GB.
_TEST_DISK = 22e9


def say_if_disk_is_short() -> None:
    """A full disk shows as a hundred strange failures: name it before they come."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    sandboxes = cache / "spark-build" / "sandbox"
    place = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < _TEST_DISK and not sandboxes.is_dir():
        say(
            f"warning: a first test run needs about {_TEST_DISK / 1e9:.0f} GB below {cache}, "
            f"and {free / 1e9:.1f} GB are free there; XDG_CACHE_HOME and "
            "SPARK_BUILD_TEST_CACHE name other places"
        )


def checks(bindir: Path) -> list[list[str]]:
    """Lint, types, freshness of generated files: also the hooks of ``.pre-commit-config.yaml``."""
    return [
        [str(bindir / "ruff"), "check", "."],
        [str(bindir / "ruff"), "format", "--check", "."],
        [str(bindir / "mypy")],
        [str(bindir / "lint-imports"), "--no-logo"],
        [str(bindir / "spark-build"), "layers", "check"],
        [str(bindir / "python"), "-m", "tests.generate", "--check"],
    ]


def compiling(words: list[str]) -> bool:
    """Whether pytest's words take in tests that compile."""
    named = [Path(word.partition("::")[0]) for word in words]
    named = [path.resolve().relative_to(ROOT) for path in named if (ROOT / path).exists()]
    return not named or any(
        path.is_relative_to(place) or Path(place).is_relative_to(path)
        for path in named
        for place in _COMPILING
    )


def bring_compilers(python: str) -> None:
    """Install the compilers that tests ask for, where they are missing."""
    compilers = [python, "-m", "tests.compilers"]
    done = subprocess.run(compilers, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if nvcc := done.stdout.strip().rpartition("\n")[2]:
        os.environ["PATH"] += os.pathsep + nvcc


def run_tests(bindir: Path, words: list[str]) -> int:
    """Run the tests that pytest's words name, and start nothing that they do not need."""
    python = str(bindir / "python")
    if compiling(words):
        bring_compilers(python)
    return subprocess.run([python, "-m", "pytest", *words], cwd=ROOT, check=False).returncode


def near_tests(bindir: Path, words: list[str]) -> list[str]:
    """Words for pytest in place of ``--changed [REF]``: test files, nearest to the change first.

    Raises:
        SystemExit: git knows no such commit (2), or no test is near (0).
    """
    ref = [word for word in words[1:2] if not word.startswith("-")]
    command = [str(bindir / "python"), "-m", "tests.changed", *ref]
    answer = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if answer.returncode:
        fail(f"git cannot compare with {' '.join(ref) or 'main'}")
    files = answer.stdout.split()
    if not files:
        say("no test is near to what changed; --test alone runs everything")
        raise SystemExit(0)
    say(f"• {len(files)} test files are near to what changed")
    return [*files, *words[1 + len(ref) :]]


def run_everything(bindir: Path) -> int:
    """Run the checks, then every test; stops at the first quick check that fails.

    Types take as long as the other checks together: they are checked beside the tests.
    """
    say_if_disk_is_short()
    python = str(bindir / "python")
    lanes = {}
    for command in checks(bindir):
        name = Path(command[0]).name
        if name == "mypy":
            lanes["types"] = command
            continue
        say(f"• {name} {' '.join(command[1:])}")
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code != 0:
            return code
    bring_compilers(python)
    pytest = (python, "-m", "pytest", "-q", "-p", "tests.lane")
    # the engine and its base image are made while the other tests run
    warm = subprocess.Popen([python, "-m", "tests.engine.prepare"], cwd=ROOT)
    try:
        return run_lanes(lanes | {name: [*pytest, *places] for name, places in _LANES.items()})
    finally:
        warm.terminate()
        warm.wait()


def run_lanes(lanes: dict[str, list[str]]) -> int:
    """Run commands side by side, and pass on what they print as they print it; 0 if all pass."""
    running: list[subprocess.Popen[str]] = []
    try:
        for name, command in lanes.items():
            say(f"• {name}: {' '.join([Path(command[0]).name, *command[1:]])}")
            lane = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            running.append(lane)
        readers = [
            threading.Thread(target=_pass_on, args=(name, lane))
            for name, lane in zip(lanes, running, strict=True)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return next((code for lane in running if (code := lane.wait())), 0)
    finally:
        for lane in running:
            lane.terminate()
            lane.wait()


def _pass_on(name: str, lane: subprocess.Popen[str]) -> None:
    """Print a lane's lines, each with the lane's name in front."""
    for line in lane.stdout or ():
        print(f"{name} | {line}", end="", flush=True)


def main() -> int:
    """Set up and run."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this runs before anything could check
        fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["--test"]:
            use_ordinary_pip(environment())
            # else each of the many programs that tests start would compile all its modules again
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            bindir, words = set_up(dev=True), arguments[1:]
            if words[:1] == ["--changed"]:
                words = near_tests(bindir, words)
            return run_tests(bindir, words) if words else run_everything(bindir)
        program = str(set_up() / "spark-build")
        os.execv(program, [program, *(arguments or ["--help"])])  # noqa: S606 - it gets our signals
    except subprocess.CalledProcessError as error:
        say(f"error: {' '.join(error.cmd)} exited {error.returncode}")
        return 2
    except KeyboardInterrupt:
        say("error: interrupted; the same command goes on where this one stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
