"""An image with layer ``ray``: its command is there, and starts for the user of a server."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from . import support
from .clients import USER, authorities

if TYPE_CHECKING:
    from .machine import Engine
    from .support import Cli


def test_the_command_of_ray_is_in_the_image(engine: Engine, cli: Cli, base_image: str) -> None:
    """The base of these tests lacks protobuf, which vLLM requires."""
    done = cli("image", "--layers", "ray", "--base", base_image, "--no-verify", "--json").ok()
    image = str(done.json["image"])
    assert {one["name"]: one["state"] for one in done.json["layers"]} == {"ray": "needed"}
    cli("verify", image, "--layers", "ray", "--level", "static").ok()
    volumes, variables = authorities()
    options = ["--network=host", *(f"--volume={a}:{b}" for a, b in volumes.items())]
    given = {**support.host_index(), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    if "SSL_CERT_FILE" in variables:
        given["PIP_CERT"] = variables["SSL_CERT_FILE"]
    options += [f"--env={name}={value}" for name, value in given.items()]
    with support.container(engine, image, *options) as held:
        engine.run("exec", held, "pip", "install", "-q", "protobuf", "pyyaml")
        said = engine.run("exec", f"--user={USER}", "--env=HOME=/tmp", held, "ray", "--version")
        assert said.strip() == "ray, version 2.58.0"
        found = engine.run("exec", held, "sh", "-c", "command -v ray").strip()
        assert found == "/usr/local/bin/ray"
    bare = subprocess.run(
        [engine.docker, "run", "--rm", "--network=none", "--entrypoint=ray", base_image],
        env=engine.env, capture_output=True, check=False,
    )  # fmt: skip
    assert bare.returncode == 127, "the base has none"
