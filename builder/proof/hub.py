"""A checkpoint on Hugging Face: its configuration and the headers of its files, never weights.

The client of Hugging Face reads them, with its own settings (``HF_TOKEN``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, its cache), in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from builder.common.console import console
from builder.common.paths import cache_dir
from builder.errors import RemoteError
from builder.proof.installed import MadeFolder, install, recorded

#: What a checkpoint's page is asked for: configuration, never weights or code.
CONFIGURATION = (
    "config.json", "hf_quant_config.json", "quantize_config.json", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "params.json",
    "model.safetensors.index.json",
)  # fmt: skip
#: The largest of them; the index of a checkpoint of a trillion parameters has about 20 MB.
MOST_BYTES = 64 << 20
#: Seconds to download them, and those without an answer.
_DOWNLOAD, _SILENCE = 300.0, 20
#: The client, and what it needs that spark-build does not: it is installed when it is first used.
_CLIENT = ("huggingface_hub==0.36.2", "fsspec==2026.9.0", "tqdm==4.70.1")
_PROGRAM = """
import json, resource, sys
request = json.loads(sys.argv[1])
sys.path[:0] = request["paths"]
import huggingface_hub as hub
resource.setrlimit(resource.RLIMIT_FSIZE, (request["most"], request["most"]))
name, reply = request["name"], {}

def told(error):
    return {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}

try:
    reply["folder"] = hub.snapshot_download(name, allow_patterns=request["files"], max_workers=4)
except Exception as error:
    reply["error"] = told(error)
if request["headers"] and "folder" in reply:
    try:
        revision = reply["folder"].replace(chr(92), "/").rpartition("/")[2]
        files = hub.get_safetensors_metadata(name, revision=revision).files_metadata
        reply["tensors"] = [
            [tensor, one.dtype, one.data_offsets[1] - one.data_offsets[0]]
            for file in files.values() for tensor, one in file.tensors.items()
        ]
    except Exception as error:
        reply["headers"] = told(error)
print(json.dumps(reply))
"""
#: Kinds of errors of the client -> what they mean, and what to do; the first that fits counts.
_ERRORS = {
    "GatedRepoError": ("its owner gives access on request",
                       "accept its terms on its page, and set HF_TOKEN"),
    "RepositoryNotFoundError": ("there is no such model, or it is private",
                                "check the id; a private one needs HF_TOKEN"),
    "HFValidationError": ("this is no id such as OWNER/NAME", "name a folder with its config.json"),
    "LocalEntryNotFoundError": ("Hugging Face cannot be reached, and its cache here lacks it",
                                "name a folder with its config.json"),
    "OfflineModeIsEnabled": ("HF_HUB_OFFLINE is set, and the cache lacks it",
                             "name a folder with its config.json"),
    "NotASafetensorsRepoError": ("it has no safetensors files", ""),
    "ConnectionError": ("Hugging Face cannot be reached", "name a folder with its config.json"),
    "Timeout": ("Hugging Face does not answer", "name a folder with its config.json"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HubCheckpoint:
    """What was read of a checkpoint."""

    #: with its configuration files, in the client's cache
    folder: Path
    #: name, dtype and bytes of each tensor; empty if the headers were not read
    tensors: tuple[tuple[str, str, int], ...] = ()
    #: why they were not
    without_headers: str = ""


def hub_checkpoint(
    name: str, *, python: Path | None = None, headers: bool = False
) -> HubCheckpoint:
    """Read a checkpoint by its id; ``python`` has the client, else ours gets it.

    Raises:
        RemoteError: it cannot be downloaded, and is not in the client's cache.
        SandboxUnavailable: the client cannot be installed.
    """
    paths = [] if python else _client()
    request = {
        "name": name, "paths": paths, "files": CONFIGURATION, "most": MOST_BYTES,
        "headers": headers,
    }  # fmt: skip
    # isolated: no module of the current folder is run
    words = [str(python or sys.executable), "-I", "-c", _PROGRAM, json.dumps(request)]
    silence = {"HF_HUB_DOWNLOAD_TIMEOUT": str(_SILENCE), "HF_HUB_ETAG_TIMEOUT": str(_SILENCE)}
    with console.progress(f"reading the configuration of {name}"):
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=_DOWNLOAD,
                env={**silence, **os.environ},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise _failed(name, f"no answer in {_DOWNLOAD:.0f} s") from None
    try:
        reply = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise _failed(name, last) from None
    if error := reply.get("error"):
        raise _failed(name, *_meaning(error["kinds"], error["message"]))
    missing = reply.get("headers")
    return HubCheckpoint(
        folder=Path(reply["folder"]),
        tensors=tuple(
            (str(n), str(dtype), int(size)) for n, dtype, size in reply.get("tensors", [])
        ),
        without_headers=_meaning(missing["kinds"], missing["message"])[0] if missing else "",
    )


def _meaning(kinds: list[str], message: str) -> tuple[str, str]:
    """What an error of the client means, and what to do; an unknown one in its own words."""
    for kind, words in _ERRORS.items():
        if kind in kinds:
            return words
    line = next((line.strip() for line in message.splitlines() if line.strip()), kinds[0])
    return f"{kinds[0]}: {line[:200]}", ""


def _failed(name: str, why: str, hint: str = "") -> RemoteError:
    place = os.environ.get("HF_ENDPOINT")
    where = f" ({place})" if place else ""
    return RemoteError(
        f"cannot read the configuration of {name}: {why}{where}",
        hint=hint or "name a folder with its config.json",
    )


def _client() -> list[str]:
    """The folders with the client of Hugging Face for our own Python; none if it has one."""
    if importlib.util.find_spec("huggingface_hub") is not None:
        return []
    folder = cache_dir() / "sandbox" / f"hub-{_CLIENT[0].partition('==')[2]}"

    def make(into: Path) -> None:
        with console.progress("the client of Hugging Face, 4 MB"):
            install(Path(sys.executable), _CLIENT, into)

    made = MadeFolder(
        folder=folder, make=make, expected=partial(recorded, packages=_CLIENT), answers=()
    )
    return [str(made.ensure())]
