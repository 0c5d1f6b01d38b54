"""All commands: where their options are, and what the list of commands says of each.

``--help`` prints this table without importing a command; ``tests/unit/cli/test_start.py`` holds it
against what the commands say of themselves.
"""

from __future__ import annotations

from typing import NamedTuple

BUILD, INSPECT, PUBLISH, MAINTAIN, DEVELOP = "Build", "Inspect", "Publish", "Maintain", "Develop"


class Entry(NamedTuple):
    """A command, or a group of commands: its name, the module and the application that hold it."""

    name: str
    module: str
    app: str
    panel: str
    summary: str


COMMANDS = (
    Entry("plan", "mainapp", "main_app", BUILD,
          "Show what each layer would do to a base; change nothing."),
    Entry("image", "mainapp", "main_app", BUILD, "Build the patched image, and verify it."),
    Entry("verify", "mainapp", "main_app", INSPECT,
          "Prove what an image is, and which kernels it selects."),
    Entry("diagnose", "mainapp", "main_app", INSPECT,
          "Say what a server log shows, what killed the server, what to do."),
    Entry("lock", "lockapp", "lock_app", MAINTAIN, "Pin everything that a build is made of."),
    Entry("apply", "applyapp", "apply_app", BUILD, "Apply layers to an installed environment."),
    Entry("revert", "applyapp", "apply_app", BUILD,
          "Put back the exact bytes from before the layers."),
    Entry("publish", "publishapp", "publish_app", PUBLISH,
          "Publish a verified image, with what proves it."),
    Entry("tags", "publishapp", "publish_app", PUBLISH,
          "List what was published, and delete what is old."),
    Entry("sign", "publishapp", "publish_app", PUBLISH,
          "Sign a published image by digest, with cosign."),
    Entry("verify-signature", "publishapp", "publish_app", PUBLISH,
          "Check who signed an image, with cosign."),
    Entry("rebuild", "publishapp", "publish_app", PUBLISH,
          "Make an image again from what it carries, and compare."),
    Entry("distribute", "publishapp", "publish_app", PUBLISH,
          "Bring an image to machines over SSH."),
    Entry("matrix", "developapp", "develop_app", INSPECT,
          "Show the state of every layer on every vLLM release."),
    Entry("schema", "developapp", "develop_app", DEVELOP,
          "Print the JSON Schema of what --json prints."),
)  # fmt: skip

GROUPS = (
    Entry("layers", "layersapp", "layers_app", DEVELOP,
          "Look at layers, check them, start a new one."),
    Entry("dispatch", "dispatch", "app", DEVELOP, "What each vLLM release selects on SM121."),
    Entry("cache", "cacheapp", "cache_app", MAINTAIN,
          "What is kept on this machine, and less of it."),
    Entry("mods", "developapp", "mods_app", DEVELOP,
          "Layers as mods for sparkrun and spark-vllm-docker."),
    Entry("config", "developapp", "config_app", MAINTAIN,
          "What spark-build would use, and where from."),
    Entry("compile", "compileapp", "compile_app", DEVELOP,
          "Compile what a prebuilt release lacks on SM121."),
    Entry("ptx", "ptxapp", "ptx_app", DEVELOP,
          "Run PTX kernels on the CPU; find races, deadlocks."),
)  # fmt: skip
