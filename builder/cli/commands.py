"""The table of commands: the module with their options, and their help line.

``--help`` prints this table without importing a command; ``tests/unit/cli/test_start.py`` holds it
against what the commands say of themselves.
"""

from __future__ import annotations

from typing import NamedTuple

BUILD, SERVE, INSPECT, PUBLISH = "Build", "Serve", "Inspect", "Publish"
MAINTAIN, DEVELOP = "Maintain", "Develop"


class Entry(NamedTuple):
    """A command or a group of commands: its name, its module and its application."""

    name: str
    module: str
    app: str
    panel: str
    summary: str


COMMANDS = (
    Entry("plan", "mainapp", "main_app", BUILD,
          "Show what each layer would do to a base."),
    Entry("image", "mainapp", "main_app", BUILD, "Build a patched image and verify it."),
    Entry("bake", "bakeapp", "bake_app", BUILD,
          "Write a build folder for docker buildx bake."),
    Entry("recipe", "servingapp", "recipe_app", SERVE,
          "Print the command or file that serves a model."),
    Entry("lint", "servingapp", "lint_app", SERVE,
          "Check serve commands in files against a release."),
    Entry("preflight", "memoryapp", "preflight_app", SERVE,
          "Ask a vLLM release whether a model starts."),
    Entry("memory", "memoryapp", "memory_app", SERVE,
          "Estimate whether a model fits into a GB10's memory."),
    Entry("audit", "memoryapp", "audit_app", SERVE,
          "Show how a model's modules are quantised."),
    Entry("bench", "servingapp", "bench_app", SERVE,
          "Measure tokens/s and prefill of a running server."),
    Entry("verify", "mainapp", "main_app", INSPECT,
          "Check an image's contents and the kernels it selects."),
    Entry("diagnose", "mainapp", "main_app", INSPECT,
          "Explain a server log: selected kernels, failures, fixes."),
    Entry("lock", "lockapp", "lock_app", MAINTAIN, "Pin every input of a build."),
    Entry("apply", "applyapp", "apply_app", BUILD, "Apply layers to an installed environment."),
    Entry("revert", "applyapp", "apply_app", BUILD,
          "Remove layers, and restore the original files."),
    Entry("publish", "publishapp", "publish_app", PUBLISH,
          "Publish a verified image together with its evidence."),
    Entry("tags", "publishapp", "publish_app", PUBLISH,
          "List published images, and delete old ones."),
    Entry("sign", "publishapp", "publish_app", PUBLISH,
          "Sign a published image by digest, with cosign."),
    Entry("verify-signature", "publishapp", "publish_app", PUBLISH,
          "Check who signed an image, with cosign."),
    Entry("rebuild", "publishapp", "publish_app", PUBLISH,
          "Rebuild an image from its own metadata, and compare."),
    Entry("distribute", "publishapp", "publish_app", PUBLISH,
          "Copy an image to machines over SSH."),
    Entry("matrix", "developapp", "develop_app", INSPECT,
          "Show the state of every layer on every vLLM release."),
    Entry("schema", "developapp", "develop_app", DEVELOP,
          "Print the JSON Schema of what --json prints."),
)  # fmt: skip

GROUPS = (
    Entry("models", "servingapp", "models_app", SERVE, "Show the known models."),
    Entry("recipes", "servingapp", "recipes_app", SERVE,
          "Export recipes for sparkrun and spark-vllm-docker."),
    Entry("layers", "layersapp", "layers_app", DEVELOP,
          "List, check and create layers."),
    Entry("dispatch", "dispatch", "app", DEVELOP, "Record the kernels that vLLM releases select."),
    Entry("cache", "cacheapp", "cache_app", MAINTAIN,
          "Show the local cache, or free space in it."),
    Entry("mods", "developapp", "mods_app", DEVELOP,
          "Export mods for sparkrun and spark-vllm-docker."),
    Entry("config", "developapp", "config_app", MAINTAIN,
          "Show the settings in use."),
    Entry("compile", "compileapp", "compile_app", DEVELOP,
          "Compile kernels that a prebuilt release lacks on SM121."),
    Entry("ptx", "ptxapp", "ptx_app", DEVELOP,
          "Run PTX kernels on the CPU; find races, deadlocks."),
)  # fmt: skip

COMMAND_NAMES = tuple(entry.name for entry in (*COMMANDS, *GROUPS))
