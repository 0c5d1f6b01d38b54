"""Checks an image from inside: ``docker run --rm --gpus all --entrypoint spark-verify IMAGE``.

Standard library only, beside its siblings and the applier.  It reads the plan that was baked in,
checks every receipt and the environment, asks the image's own vLLM which kernels it selects for
SM121, runs those kernels on the GPU, and serves a tiny model.  Without a GPU, checks that need one
are *not run*, which is never a pass.

Exit status: 0 nothing failed, 5 a check failed (or did not run in a level that ``--level`` or
``--require`` names), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from builder.applier.receipts import receipts_of, unexplained
from builder.applier.trees import DirTree, find_site_packages
from builder.probes import (
    device_checks,
    dispatch_expect,
    dispatch_probe,
    serve_checks,
    verify_checks,
)

#: The folder that the program is in, with the plan and its data.
HERE = verify_checks.ROOT.parent
EXIT_USAGE, EXIT_FAILED = 2, 5
LEVELS = ("static", "dispatch", "device", "serve")


def check(level: str, name: str, good: bool, expected: str, seen: str) -> dict[str, Any]:
    """One check with its evidence."""
    return dict(verify_checks.check(level, name, good, expected, seen))


def check_layers(plan: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    """Is every layer that the plan applied still there, file by file?"""
    tree = DirTree(root)
    receipts = receipts_of(tree)
    checks = []
    for layer in plan["layers"]:
        if layer["state"] != "needed":
            continue
        receipt = next((r for r in receipts if r.layer == layer["name"]), None)
        expected = "receipt present and every file matches it"
        if receipt is None:
            seen, good = "no receipt: the layer is not applied", False
        else:
            wrong = unexplained(receipt, receipts, tree)
            good = not wrong
            seen = f"{len(wrong)} files differ, such as {wrong[0]}" if wrong else "as recorded"
        checks.append(check("static", f"layer {layer['name']}", good, expected, seen))
    return checks


def check_environment(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Does this process see the variables that the plan set?"""
    return [
        check(
            "static",
            f"env {name}",
            os.environ.get(name) == value,
            value,
            os.environ.get(name, "(unset)"),
        )
        for name, value in sorted(plan["env"].items())
    ]


def check_dispatch(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Does vLLM, told that the device is SM121, select what the profile expects?"""
    expectations = dispatch_expect.Expectation.of(plan)
    flags = [*plan["serve_flags"], *plan["moe_serve_flags"]]
    if not expectations:
        return []
    answer = subprocess.run(
        verify_checks.command(dispatch_probe.__name__),
        input=json.dumps({"ask": dispatch_expect.asks(expectations, flags)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    try:
        result = json.loads(answer.stdout)
    except ValueError:
        fatal = f"the probe ended with {answer.returncode} and no result"
        result = {"fatal": {"type": "no result", "message": fatal}}
    checks = []
    parts = result.get("simulated", [])
    for number, item in enumerate(expectations):
        wanted = dispatch_expect.describe(item)
        if result["fatal"]:
            met, seen = None, f"{result['fatal']['type']}: {result['fatal']['message']}"
        else:
            reply = dispatch_expect.Answer.of(result["answers"][number])
            met, seen = dispatch_expect.found(item, reply), dispatch_expect.headline(reply)
        row = check("dispatch", item.kind, met is not None, wanted, met or seen)
        refusal = dispatch_expect.limit(item, met) if met else ""
        more = {"simulated": parts, "refusal": refusal}
        checks.append({**row, **{key: value for key, value in more.items() if value}})
    for part in parts:
        verify_checks.say(f"  simulated  {part}")
    return checks


def check_static(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Receipts and variables."""
    root = Path(plan["base"]["site_packages"])
    if not root.is_dir():
        root = find_site_packages()
    return [*check_layers(plan, root), *check_environment(plan)]


def check_on_gpu(levels: list[str], plan: dict[str, Any], options: argparse.Namespace) -> list[Any]:
    """The levels that need a GPU."""
    data = json.loads((HERE / "device.json").read_bytes())
    checks = device_checks.run(plan, data) if "device" in levels else []
    if "serve" in levels:
        trouble = str(device_checks.ask_driver().get("error", ""))
        wanted = ("bench", "against", "model", "serve_args")
        chosen = {name: getattr(options, name) for name in wanted}
        if options.ready_timeout is not None:
            chosen["ready"] = options.ready_timeout
        checks += serve_checks.run(plan, data, chosen, trouble)
    return checks


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="spark-verify", description="verify this spark-build image from inside"
    )
    parser.add_argument(
        "--level",
        action="append",
        choices=LEVELS,
        help="run only these levels; they must run (default: all; device and serve need a GPU)",
    )
    parser.add_argument(
        "--require",
        action="append",
        choices=LEVELS,
        default=[],
        help="also run this level; it must run",
    )
    parser.add_argument("--json", action="store_true", help="print the evidence as JSON")
    parser.add_argument(
        "--bench", action="store_true", help="measure the served models: tokens/s, first token"
    )
    parser.add_argument(
        "--against", metavar="FILE", help="evidence with a bench of another image, to compare with"
    )
    parser.add_argument(
        "--model", help="serve this model instead of the generated ones: a folder, or a cached name"
    )
    parser.add_argument("--serve-args", metavar="TEXT", help="more arguments for vllm serve")
    parser.add_argument(
        "--ready-timeout", type=float, metavar="S", help="seconds that a server may take to start"
    )
    options = parser.parse_args(arguments)
    if options.against:
        options.bench = True
        try:
            loaded = json.loads(Path(options.against).read_text("utf-8"))
            assert isinstance(loaded["checks"], list)
        except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
            parser.error(f"--against {options.against} is not evidence from spark-verify: {error}")
    return options


def main() -> int:
    """Run all checks and print them."""
    options = parse()
    levels = [level for level in LEVELS if level in {*(options.level or LEVELS), *options.require}]
    plan = json.loads((HERE / "plan.json").read_bytes())
    checks: list[dict[str, Any]] = []
    if "static" in levels:
        checks += check_static(plan)
    if "dispatch" in levels:
        checks += check_dispatch(plan)
    if {"device", "serve"} & set(levels):
        checks += check_on_gpu(levels, plan, options)
    passed = verify_checks.passed(checks, [*(options.level or ()), *options.require])
    if options.json:
        document = {"schema": 1, "plan_digest": plan["plan_digest"], "passed": passed}
        print(json.dumps({**document, "checks": checks}, indent=1))
    else:
        verify_checks.show(checks)
        idle = sorted({item["level"] for item in checks if item["status"] == "not-run"})
        word = f"NOT PROVEN, {', '.join(idle)} did not run" if idle else "verified"
        print(f"plan {plan['plan_digest']}: {word if passed else 'NOT verified'}")
    return 0 if passed else EXIT_FAILED
