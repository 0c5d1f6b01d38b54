"""What can be verified: an image, an overlay layout, released wheels, a directory."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import bake
from builder.bases import Base, BaseRequest, identify, scheme_of
from builder.errors import SparkBuildError, UsageError
from builder.planner import make_plan
from builder.runtime.spark_apply import Content, OverlayTree, Target, versions
from builder.verify import VerifyTarget
from builder.verify.codegen import PROBE, python_compiler, sandbox_compiler
from builder.verify.sandbox import (
    Sandbox,
    SandboxUnavailable,
    ask_probe,
    lay_out,
    requirements_for,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker.models.containers import Container

    from builder.catalog import Selection
    from builder.index import PackageIndex
    from builder.model import BuildPlan
    from builder.runtime.spark_apply import Tree
    from builder.wheels import IndexSources

Ask = "Callable[[Mapping[str, Any]], Mapping[str, Any]] | None"


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What is needed to open a target besides its name."""

    index: PackageIndex
    sources: IndexSources
    selection: Selection | None = None
    platform: str | None = None


def open_target(text: str, opening: Opening) -> VerifyTarget:
    """Open a target by its reference.

    Raises:
        UsageError: the reference is malformed, or says nothing about which layers to expect.
    """
    scheme, rest = scheme_of(text)
    if scheme == "oci":
        return open_layout(Path(rest), opening)
    if scheme == "docker":
        return _open_engine_image(rest, opening)
    pins = opening.selection.pins() if opening.selection else {}
    request = BaseRequest(ref=text, platform=opening.platform, pins=pins, index=opening.index)
    base = identify(request)
    try:
        if opening.selection is None:
            raise UsageError(
                f"{text} does not say which layers it should have",
                hint=f"spark-build verify {text} --layers b12x-full",
            )
        plan = make_plan(base, opening.selection, opening.sources)
        return target_of_plan(plan, base, text, patched=False)
    except BaseException:
        base.close()
        raise


def target_of_plan(plan: BuildPlan, base: Base, name: str, *, patched: bool) -> VerifyTarget:
    """A plan's base as it is, or (``patched``) as the plan leaves it, before any image exists."""
    tree: Tree = base.tree
    env = dict(base.identity.env)
    if patched:
        overlay = OverlayTree(base.tree)
        overlay.update(plan.changes)
        tree = overlay
        env |= plan.env
    ask, why = _ask_of(tree, base)
    return VerifyTarget(
        name=name,
        kind=base.identity.kind,
        plan=plan.as_json(),
        layers=[d.layer for d in plan.decisions],
        tree=tree,
        env=env,
        ask=ask,
        cannot_ask=why,
        compile=_compiler_of(tree, base, patched=patched),
        close=base.close,
    )


def _compiler_of(tree: Tree, base: Base, *, patched: bool) -> Any:
    python = _own_python(base)
    if python is not None and not patched:
        return python_compiler(python)
    return sandbox_compiler(tree, dict(base.identity.packages))


def _own_python(base: Base) -> Path | None:
    """The interpreter of a directory that is an environment of this machine."""
    if base.identity.kind != "dir":
        return None
    python = Path(base.identity.site_packages).parents[2] / "bin" / "python"
    here = base.identity.platform.target.platform == Target.here().platform
    return python if here and python.exists() else None


def _ask_of(tree: Tree, base: Base) -> tuple[Any, str]:
    python = _own_python(base)
    if python is not None:
        return (lambda request: ask_probe(python, request)), ""
    return sandbox_asker(tree, dict(base.identity.packages))


def sandbox_asker(tree: Tree, packages: Mapping[str, str]) -> tuple[Any, str]:
    """A way to ask the vLLM of any tree in a sandbox, or why there is none."""
    current = {**packages, **versions(tree)}

    def ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:  # made when it is first asked: the other levels need no download
            requirements = requirements_for(packages["vllm"])
            sandbox = Sandbox(requirements)
            sandbox.prepare()
            extra = [str(sandbox.dsl(current))] if requirements.needs_dsl else []
        except SparkBuildError as error:
            hint = f"; try: {error.hint}" if error.hint else ""
            raise SandboxUnavailable(f"{error}{hint}") from None
        folder = lay_out(tree)
        has_cubin = "flashinfer-cubin" in current
        full = {
            **request,
            "paths": [str(folder), *extra],
            "pretend_nvcc": not has_cubin,
            "pretend_triton": requirements.pretend_triton,
        }
        result = sandbox.ask(full)
        result.setdefault("simulated", []).insert(
            0, f"torch {requirements.torch} (CPU build) and this machine's Python, in a sandbox"
        )
        return result

    return ask, ""


def open_layout(layout: Path, opening: Opening) -> VerifyTarget:
    """An overlay layout laid over the released wheels that its plan names.

    Raises:
        UsageError: it is not a layout of ours, is damaged, or is meant for other wheels.
    """
    from builder.engines.oci import read_layout

    plan, files, env = read_layout(layout)
    return _open_overlay(f"oci:{layout}", plan, files, env, opening)


def _open_overlay(
    name: str,
    plan: dict[str, Any],
    files: Mapping[str, bytes | None],
    env: Mapping[str, str],
    opening: Opening,
) -> VerifyTarget:
    site = plan["base"]["site_packages"]
    request = BaseRequest(
        ref=_exact_ref(plan),
        platform=plan["base"]["platform"],
        python=plan["base"]["python"],
        site_packages=site,
        pins={},
        index=opening.index,
    )
    base = identify(request)
    if base.identity.digest != plan["base"]["digest"]:
        raise UsageError(
            f"{name} was made for wheels {plan['base']['digest'][:19]}..., the package index "
            f"has {base.identity.digest[:19]}...: a wheel was replaced since"
        )
    overlay = OverlayTree(base.tree)
    prefix = f"{site}/"
    overlay.update(
        {
            path.removeprefix(prefix): None if data is None else Content.of(data)
            for path, data in {**_taken_away(plan), **files}.items()
            if path.startswith(prefix)
        }
    )
    if opening.selection is not None:
        judged = Base(dataclasses.replace(base.identity, env=dict(env)), overlay)
        judged_plan = make_plan(judged, opening.selection, opening.sources)
        return target_of_plan(judged_plan, judged, name, patched=False)
    ask, why = sandbox_asker(overlay, plan["base"]["packages"])
    return VerifyTarget(
        name=name,
        kind="oci",
        brought=tuple(files),
        plan=plan,
        layers=json.loads(files[f"{bake.SHARE}/layers.json"] or b"[]"),
        tree=overlay,
        env=env,
        ask=ask,
        cannot_ask=why,
        compile=sandbox_compiler(overlay, plan["base"]["packages"]),
    )


def _exact_ref(plan: Mapping[str, Any]) -> str:
    """The base with every version named; vLLM first, so that wheels are laid out in its order."""
    packages = dict(plan["base"]["packages"])
    named = {"vllm": packages.pop("vllm"), **packages}
    return "pypi:" + ",".join(f"{name}=={version}" for name, version in named.items())


def _open_engine_image(ref: str, opening: Opening) -> VerifyTarget:
    """An image in a Docker Engine: an overlay of ours, or one that vLLM runs in."""
    from builder.engines import docker

    client = docker.connect()
    try:
        image = docker.find_image(client, ref, opening.platform)
        with docker.created(client, image.id or ref) as container:
            baked = docker.read_file(container, f"{bake.SHARE}/plan.json")
            layers = docker.read_file(container, f"{bake.SHARE}/layers.json")
            plan = json.loads(baked) if baked else None
            if plan and _stands_alone(plan, container):
                files: dict[str, bytes | None] = dict(docker.export_files(container))
                env = docker.env_of_image(image)
                return _open_overlay(ref, plan, files, env, opening)
    finally:
        client.close()
    return _open_image(ref, plan, json.loads(layers or b"[]"), opening)


def _stands_alone(plan: Mapping[str, Any], container: Container) -> bool:
    """Whether an image is a mere overlay, not one that was put onto an image with vLLM."""
    from builder.engines import docker

    base = plan["base"]
    metadata = f"vllm-{base['packages']['vllm']}.dist-info/METADATA"
    found = docker.read_file(container, f"{base['site_packages']}/{metadata}")
    return base["kind"] == "pypi" and found is None


def _taken_away(plan: Mapping[str, Any]) -> dict[str, bytes | None]:
    """Files that the plan removes: an image that stands on nothing cannot hold whiteouts."""
    site = plan["base"]["site_packages"]
    return {
        f"{site}/{file['path']}": None
        for layer in plan["layers"]
        for file in layer["files"]
        if file["after"] is None
    }


def _open_image(
    ref: str, plan: dict[str, Any] | None, layers: list[Any], opening: Opening
) -> VerifyTarget:
    pins = opening.selection.pins() if opening.selection else {}
    base = identify(BaseRequest(ref=ref, platform=opening.platform, pins=pins, index=opening.index))
    try:
        if opening.selection is not None:
            plan = make_plan(base, opening.selection, opening.sources).as_json()
            layers = [dict(layer) for layer in opening.selection.layers]
        elif plan is None:
            raise UsageError(
                f"image {ref} carries no spark-build plan, so nothing says what it should be",
                hint=f"spark-build verify {ref} --layers b12x-full",
            )
    except BaseException:
        base.close()
        raise

    def ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return ask_in_container(base, request)

    def compile_kernels(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return ask_in_container(base, request, PROBE)

    return VerifyTarget(
        name=ref,
        kind="image",
        plan=plan,
        layers=layers,
        tree=base.tree,
        env=base.identity.env,
        ask=ask,
        compile=compile_kernels,
        close=base.close,
    )


_STARTER = (
    "import io, os, sys; sys.stdin = io.StringIO(os.environ.pop('SPARK_BUILD_REQUEST')); "
    "source = os.environ.pop('SPARK_BUILD_PROBE'); sys.argv = ['probe.py']; "
    "exec(compile(source, 'probe.py', 'exec'), {'__name__': '__main__'})"
)


def ask_in_container(
    base: Base, request: Mapping[str, Any], probe: str = "dispatch_probe.py"
) -> dict[str, Any]:
    """Ask the image's own interpreter, vLLM and extension modules; no network, no GPU.

    Raises:
        SandboxUnavailable: the probe did not end with a result.
    """
    from builder.engines import docker
    from builder.paths import package_file

    client = docker.connect()
    env = {
        "SPARK_BUILD_REQUEST": json.dumps(request),
        "SPARK_BUILD_PROBE": package_file("runtime", probe).read_text("utf-8"),
    }
    command = [base.identity.interpreter, "-B", "-c", _STARTER]
    try:
        output = docker.run(client, base.identity.ref, command, env=env)
        result: dict[str, Any] = json.loads(output)
    except ValueError as error:
        raise SandboxUnavailable(f"the probe gave no result in the container: {error}") from None
    finally:
        client.close()
    return result
