"""The table of commands: their modules and summaries; ``--help`` prints it and imports none."""

from __future__ import annotations

from typing import NamedTuple

BUILD, SERVE, INSPECT, PUBLISH = "Build", "Serve", "Inspect", "Publish"
MAINTAIN, DEVELOP = "Maintain", "Develop"


class Entry(NamedTuple):
    """A command or a group of commands: its name, its module, and its place in help."""

    name: str
    module: str
    panel: str
    summary: str


COMMANDS = (
    Entry("plan", "build", BUILD, "Show what each layer would do to a base."),
    Entry("image", "build", BUILD, "Build a patched image and verify it."),
    Entry("bake", "build", BUILD, "Write a build folder for docker buildx bake."),
    Entry("recipe", "recipe", SERVE,
          "Print the command or file that serves a model."),
    Entry("lint", "lint", SERVE,
          "Check serve commands in files against a release."),
    Entry("preflight", "preflight", SERVE,
          "Ask a vLLM release whether a model starts."),
    Entry("memory", "memory", SERVE,
          "Estimate whether a model fits into a GB10's memory."),
    Entry("audit", "memory", SERVE, "Show how a model's modules are quantised."),
    Entry("bench", "bench", SERVE,
          "Measure tokens/s and prefill of a running server."),
    Entry("verify", "build", INSPECT, "Check an image's contents and the kernels it selects."),
    Entry("diagnose", "diagnose", INSPECT,
          "Explain a server log: selected kernels, failures, fixes."),
    Entry("lock", "build", MAINTAIN, "Pin every input of a build."),
    Entry("apply", "build", BUILD, "Apply layers to an installed environment."),
    Entry("revert", "build", BUILD, "Remove layers, and restore the original files."),
    Entry("publish", "publish", PUBLISH,
          "Publish a verified image together with its evidence."),
    Entry("tags", "publish", PUBLISH,
          "List published images, and delete old ones."),
    Entry("sign", "publish", PUBLISH,
          "Sign a published image by digest, with cosign."),
    Entry("verify-signature", "publish", PUBLISH,
          "Check who signed an image, with cosign."),
    Entry("rebuild", "publish", PUBLISH,
          "Rebuild an image from its own metadata, and compare."),
    Entry("distribute", "publish", PUBLISH,
          "Copy an image to machines over SSH."),
    Entry("matrix", "matrix", INSPECT,
          "Show the state of every layer on every vLLM release."),
    Entry("outdated", "matrix", MAINTAIN,
          "Say what vLLM's releases since then change for you."),
    Entry("schema", "config", DEVELOP, "Print the JSON Schema of what --json prints."),
)  # fmt: skip

GROUPS = (
    Entry("models", "recipe", SERVE, "Show the known models."),
    Entry("recipes", "recipe", SERVE,
          "Export recipes for sparkrun and spark-vllm-docker."),
    Entry("layers", "layers", DEVELOP, "List, check and create layers."),
    Entry("dispatch", "matrix", DEVELOP, "Record the kernels that vLLM releases select."),
    Entry("cache", "cache", MAINTAIN, "Show the local cache, or free space in it."),
    Entry("mods", "layers", DEVELOP, "Export mods for sparkrun and spark-vllm-docker."),
    Entry("config", "config", MAINTAIN, "Show the settings in use."),
    Entry("compile", "compile", DEVELOP,
          "Compile kernels that a prebuilt release lacks on SM121."),
    Entry("ptx", "ptx", DEVELOP, "Run PTX kernels on the CPU; find races and deadlocks."),
)  # fmt: skip

COMMAND_NAMES = tuple(entry.name for entry in (*COMMANDS, *GROUPS))
