"""Variables and flags of a stranger, in front of releases that read them: no trap springs.

Every variable and flag that takes a path, a module or an address names a trap. Whatever touches
one, or writes outside of the cache, is seen.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.paths import cache_dir
from builder.proof.sandbox import lay_out, python_files
from builder.proof.variables import LEFT_OUT, is_read, known

from .cli import spark_build
from .layouts import Layout
from .states import expected
from .support import snapshot
from .test_preflight import LLAMA
from .traps import Traps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.applier.trees import Tree

    from .cli import Ran
    from .support import Planner

RELEASES = tuple(expected()["vllm"].releases)
#: Of these the code is run.
RUN = ("0.20.1", "0.33.0")
LOGGING = "VLLM_LOGGING_CONFIG_PATH"


# ------------------------------------------------------------------- what releases make of a value

#: Functions of ``envs.py`` whose result is a number, a switch or a name that they are given.
CLOSED = {"bool", "int", "float", "maybe_convert_bool", "maybe_convert_int", "env_with_choices"}
#: Variables with words that a release compares with its own names: what they are.
WORDS = {
    "VLLM_DISABLED_KERNELS": "names of classes that are not chosen",
    "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS": "names of operators that are not tuned",
    "VLLM_HUMMING_MOE_GEMM_TYPE": "one of three names",
    "VLLM_PP_LAYER_PARTITION": "numbers of layers",
}


def readers(tree: Tree) -> dict[str, ast.expr]:
    """How a release reads each variable: the table of its ``envs.py``."""
    module = ast.parse(tree.read("vllm/envs.py") or b"")
    for node in ast.walk(module):
        match node:
            case ast.AnnAssign(
                target=ast.Name(id="environment_variables"), value=ast.Dict() as table
            ):
                pairs = zip(table.keys, table.values, strict=True)
                return {str(k.value): value for k, value in pairs if isinstance(k, ast.Constant)}
            case _:
                pass
    raise AssertionError("envs.py has no table of variables")


def is_closed(node: ast.expr) -> bool:
    """Whether an expression can only be a number, a switch or a name that the release has."""
    match node:
        case ast.Constant() | ast.Compare():
            return True
        case ast.Lambda(body=body) | ast.NamedExpr(value=body):
            return is_closed(body)
        case ast.IfExp(body=body, orelse=other):
            return is_closed(body) and is_closed(other)
        case ast.BoolOp(values=values):
            return all(map(is_closed, values))
        case ast.Call(func=ast.Attribute(value=ast.Dict(values=values), attr="get")):
            return all(map(is_closed, values))
        case ast.Call(func=ast.Name(id="deprecated_env"), args=arguments):
            return is_closed(arguments[-1])
        case ast.Call(func=ast.Name(id=name)):
            return name in CLOSED or name.startswith("_deprecated")
        case _:
            return False


@pytest.mark.parametrize("release", RELEASES)
def test_no_release_reads_a_variable_of_the_list_as_a_place(planned: Planner, release: str) -> None:
    read = readers(planned(f"pypi:vllm=={release}", "marlin").base.tree)
    listed = known().forms.keys() & read.keys() - WORDS.keys()
    assert len(listed) > 30
    assert [name for name in sorted(listed) if not is_closed(read[name])] == []


def test_every_variable_of_the_list_is_read_by_a_release(planned: Planner) -> None:
    trees = [planned(f"pypi:vllm=={one}", "marlin").base.tree for one in RELEASES]
    read = set().union(*map(readers, trees))
    own = {name for name in known().forms if name.startswith("VLLM_")}
    assert own - read == set()
    assert WORDS.keys() <= own


@pytest.mark.parametrize(
    ("reader", "closed"),
    [
        ("lambda: bool(int(os.getenv('A', '0')))", True),
        ("lambda: os.getenv('A', '0') == '1'", True),
        ("env_with_choices('A', None, ['b'])", True),
        ("deprecated_env('A', 'v1', 'x', lambda: os.getenv('A'))", False),
        ("lambda: os.getenv('A', None)", False),
        ("lambda: os.environ.get('A', '').split(',')", False),
        ("lambda: json.loads(os.getenv('A'))", False),
        ("lambda: os.path.expanduser(os.getenv('A')) if 'A' in os.environ else None", False),
    ],
)
def test_readers_of_places_are_known(reader: str, *, closed: bool) -> None:
    assert is_closed(ast.parse(reader, mode="eval").body) is closed


# ----------------------------------------------------------------------------- traps of every kind


#: What torch, Triton, Hugging Face, the DSL and Python read besides.
OTHERS = (
    "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_LIBS", "CUTE_DSL_LOG_TO_FILE",
    "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_REMARKS", "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS_OUT",
    "TORCH_TRACE", "TORCH_COMPILE_DEBUG_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TORCH_LOGS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_HOME",
    "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_PTXAS_PATH", "TRITON_PLUGIN_PATHS",
    "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN_PATH", "HF_MODULES_CACHE",
    "TRANSFORMERS_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HOME", "TMPDIR", "PYTHONPATH",
    "PYTHONSTARTUP", "PYTHONUSERBASE", "LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_HOME", "NVCC", "CXX",
    "CC", "HTTPS_PROXY", "DG_JIT_CACHE_DIR", "NUMBA_CACHE_DIR", "TVM_HOME",
)  # fmt: skip


@pytest.fixture
def traps(tmp_path: Path) -> Iterator[Traps]:
    with Traps(tmp_path / "traps") as made:
        yield made


def test_what_touches_a_trap_is_seen(traps: Traps) -> None:
    values = traps.lay(["VLLM_A_PATH", "VLLM_B_DIR", "VLLM_C_URL", "VLLM_D_PATH"])
    assert traps.touched() == set()
    Path(values["VLLM_A_PATH"]).read_text()
    Path(values["VLLM_B_DIR"], "new").touch()
    port = int(values["VLLM_C_URL"].split(":")[2].split("/")[0])
    socket.create_connection(("127.0.0.1", port)).close()
    assert traps.touched() == {"VLLM_A_PATH", "VLLM_B_DIR", "the address"}
    assert traps.touched() == set()


#: Names of FlashInfer's variables that take a place, a program or its arguments.
PLACES = re.compile(r"DIR|PATH|BASE|DEST|NVCC|LAUNCHER|REPOSITORY|PTXAS|FLAGS|CACHE$|OPTIONS")


@dataclass(frozen=True)
class Unlisted:
    """Variables that a release reads, and that are not on the list."""

    #: those that are set to a trap
    places: list[str]
    #: numbers and switches, with which a release goes on to the traps
    others: list[str]

    @property
    def named(self) -> set[str]:
        """Those that are said to be left out."""
        return {name for name in (*self.places, *self.others) if is_read(name)}

    def set(self, traps: Traps) -> dict[str, str]:
        """A value for each."""
        return {**dict.fromkeys(self.others, "1"), **traps.lay(self.places)}


@pytest.fixture
def unlisted(planned: Planner) -> Callable[[str], Unlisted]:
    def of(release: str) -> Unlisted:
        tree = planned(f"pypi:vllm=={release}").base.tree
        folder, names = lay_out(tree), set[str]()
        for path in python_files(tree):
            if path.startswith("flashinfer") and path.endswith(".py"):
                text = (folder / path).read_text("utf-8")
                names.update(re.findall(r"[\"'](FLASHINFER_[A-Z0-9_]+)[\"']", text))
        places = {*OTHERS, *filter(PLACES.search, names)}
        places |= {name for name, reader in readers(tree).items() if not is_closed(reader)}
        others = {*names, *readers(tree)} - places
        listed = known().forms.keys()
        return Unlisted(places=sorted(places - listed), others=sorted(others - listed))

    return of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Ran]]:
    """Run a command with an empty HOME; afterwards only installers have written there."""
    home = tmp_path / "home"
    home.mkdir()

    def ran(*words: str) -> Ran:
        env = {"HOME": str(home), "SPARK_BUILD_CACHE": str(cache_dir())}
        return spark_build(*words, "--json", cwd=home, env=env, timeout=900)

    yield ran
    written = snapshot(home)
    assert [path for path in written if not path.startswith((".cache/uv/", ".cache/pip/"))] == []


def image_of(release: str, root: Path) -> Layout:
    """An image with the layers of a profile, as an overlay."""
    words = ("image", "--layers", "b12x-full", "--base", f"pypi:vllm=={release}", "--no-verify")
    made = spark_build(*words, "--output", f"oci:{root / 'image'}", cwd=root)
    assert made.code == 0, made.err
    return Layout(root / "image")


#: vLLM's own share of the memory is more than most GB10s have free.
SHARE = ("--gpu-memory-utilization", "0.8")


def compose_of(release: str, model: Path, env: dict[str, str], flags: str = "") -> str:
    """A compose file that serves a model."""
    service = {
        "image": f"vllm/vllm-openai:v{release}",
        "environment": env,
        "command": f"--model {model} {shlex.join(SHARE)} {flags}",
    }
    return json.dumps({"services": {"vllm": service}})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model that nobody asked about before, so that no answer is from the cache."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "made_by": str(tmp_path)}))
    return folder


def left_out(parts: list[str]) -> set[str]:
    """The variables that are said to be left out."""
    return {part.split()[2] for part in parts if part.startswith(LEFT_OUT)}


def logging_trap(folder: Path) -> tuple[Path, Path]:
    """A configuration of Python's logging that runs a command, and the file that it would make."""
    sprung, file = folder / "sprung", folder / "logging.json"
    handler = {"()": "os.system", "command": f"touch {sprung}"}
    trap = {"version": 1, "handlers": {"h": handler}, "root": {"handlers": ["h"]}}
    file.write_text(json.dumps(trap))
    return file, sprung


@pytest.mark.parametrize("release", RUN)
def test_variables_of_an_image_spring_no_trap(
    release: str, model: Path, tmp_path: Path, traps: Traps, run: Any, unlisted: Any
) -> None:
    file, sprung = logging_trap(tmp_path)
    given = unlisted(release)
    assert len(given.places) > 80
    env = {**given.set(traps), LOGGING: str(file)}
    image = image_of(release, tmp_path)
    rows = [f"{name}={value}" for name, value in env.items()]
    image.change_config(lambda config: config["config"]["Env"].extend(rows))
    ran = run("verify", f"oci:{image.root}", "--level", "dispatch,model", "--model", str(model))
    assert traps.touched() == set()
    assert not sprung.exists()
    checks = [one for one in ran.json()["checks"] if one["level"] in ("dispatch", "model")]
    assert {one["status"] for one in checks} == {"pass"}
    for check in checks:
        assert left_out(check["simulated"]) == given.named


@pytest.mark.parametrize("release", RUN)
def test_variables_of_a_compose_file_spring_no_trap(
    release: str, model: Path, tmp_path: Path, traps: Traps, run: Any, unlisted: Any
) -> None:
    file, sprung = logging_trap(tmp_path)
    given = unlisted(release)
    assert len(given.places) > 80
    env = {**given.set(traps), LOGGING: str(file), "VLLM_USE_DEEP_GEMM": "0"}
    (tmp_path / "compose.yaml").write_text(compose_of(release, model, env))
    ran = run("preflight", str(tmp_path / "compose.yaml"))
    assert traps.touched() == set()
    assert not sprung.exists()
    document = ran.json()
    assert (ran.code, document["starts"]) == (0, "yes"), document["reason"]
    assert document["environment"] == {"VLLM_USE_DEEP_GEMM": "0"}
    assert left_out(document["simulated"]) == given.named


@pytest.mark.parametrize("name", [LOGGING, "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE"])
def test_a_variable_alone_springs_no_trap(
    name: str, model: Path, tmp_path: Path, traps: Traps, run: Any
) -> None:
    """Others may end a release before it comes to this one."""
    file, sprung = logging_trap(tmp_path)
    (value,) = traps.lay([name]).values()
    env = {name: str(file) if name == LOGGING else value}
    (tmp_path / "compose.yaml").write_text(compose_of(RUN[-1], model, env))
    ran = run("preflight", str(tmp_path / "compose.yaml"))
    assert traps.touched() == set()
    assert not sprung.exists()
    assert (ran.code, left_out(ran.json()["simulated"])) == (0, {name})


# ------------------------------------------------------------------------------------------- flags


#: A module of Python's own that nothing imports: it stands for one that a flag names.
MODULE = "this"
CONNECTOR = {"kv_connector": "X", "kv_connector_module_path": MODULE, "kv_role": "kv_both"}
ENCODER = {"ec_connector": "X", "ec_connector_module_path": MODULE, "ec_role": "ec_producer"}
#: Flags whose value is code: a class or a module.
OF_MODULES: dict[str, str] = {
    "--worker-cls": f"{MODULE}.s",
    "--worker-extension-cls": f"{MODULE}.s",
    "--scheduler-cls": f"{MODULE}.s",
    "--logits-processors": f"{MODULE}:s",
    "--middleware": f"{MODULE}.s",
    "--distributed-executor-backend": f"{MODULE}.s",
    "--kv-transfer-config": json.dumps(CONNECTOR),
    "--ec-transfer-config": json.dumps(ENCODER),
    "--hf-overrides": json.dumps({"auto_map": {"AutoConfig": f"{MODULE}.s"}}),
    "--io-processor-plugin": MODULE,
    "--compilation-config": json.dumps({"backend": f"{MODULE}.s"}),
}
#: Flags that the newest release acts on when it makes its configuration.
OF_CODE = {
    "--log-config-file": "@",
    "--logging-config.pylogging_config_file": "@",
    "--distributed-executor-backend": f"{MODULE}.s",
    "--kv-transfer-config": json.dumps(CONNECTOR),
}
#: Flags whose value is a file, a folder or an address; ``@`` stands for it.
OF_PLACES: dict[str, str] = {
    "--tool-parser-plugin": "@",
    "--reasoning-parser-plugin": "@",
    "--chat-template": "@",
    "--log-config-file": "@",
    "--ssl-keyfile": "@",
    "--lora-modules": "x=@",
    "--download-dir": "@",
    "--allowed-local-media-path": "@",
    "--otlp-traces-endpoint": "@",
    "--structured-outputs-config": '{"reasoning_parser_plugin": "@"}',
    "--profiler-config": '{"profiler": "torch", "torch_profiler_dir": "@"}',
    "--compilation-config": '{"debug_dump_path": "@", "cache_dir": "@"}',
    "--model-loader-extra-config": '{"tensorizer_uri": "@"}',
    "--tokenizer": "@",
    "--hf-config-path": "@",
    "--generation-config": "@",
}


@pytest.mark.parametrize("release", RUN)
def test_flags_of_a_file_spring_no_trap(
    release: str, model: Path, tmp_path: Path, traps: Traps, run: Any
) -> None:
    """All at once: each is left out, so none ends the release before it comes to another."""
    file, sprung = logging_trap(tmp_path)
    values = traps.lay([flag.strip("-") for flag in OF_PLACES])
    traps.watch_module(MODULE)
    words = [word for pair in OF_MODULES.items() for word in pair]
    for flag, text in OF_PLACES.items():
        words += [flag, text.replace("@", values[flag.strip("-")])]
    words += ["--log-config-file", str(file), "--logging-config.pylogging_config_file", str(file)]
    asked = ["--quantization", MODULE, "--load-format", MODULE]  # names that a release looks up
    script = shlex.join(["vllm", "serve", str(model), *SHARE, *words, *asked])
    (tmp_path / "serve.sh").write_text(f"{script}\n")
    ran = run("preflight", str(tmp_path / "serve.sh"), "--release", release)
    assert traps.touched() == set()
    assert not sprung.exists()
    document = ran.json()
    assert (ran.code, document["flags"]) == (0, [*SHARE, *asked]), document["reason"]
    assert {*OF_MODULES, *OF_PLACES} <= left_out(document["simulated"])


@pytest.mark.parametrize("choice", [*OF_CODE.items()])
def test_a_flag_alone_springs_no_trap(
    choice: tuple[str, str], model: Path, tmp_path: Path, traps: Traps, run: Any
) -> None:
    """Releases import or read what each of these names, and one of them runs it."""
    file, sprung = logging_trap(tmp_path)
    traps.watch_module(MODULE)
    flag, value = choice[0], choice[1].replace("@", str(file))
    script = shlex.join(["vllm", "serve", str(model), *SHARE, flag, value])
    (tmp_path / "serve.sh").write_text(f"{script}\n")
    ran = run("preflight", str(tmp_path / "serve.sh"), "--release", RUN[-1])
    assert traps.touched() == set()
    assert not sprung.exists()
    assert (ran.code, left_out(ran.json()["simulated"])) == (0, {flag})
