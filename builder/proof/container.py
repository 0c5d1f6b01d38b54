"""Verifies an image in a Docker Engine, with its own interpreter in a container."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from builder.common.model.base import base_kind
from builder.common.model.reference import Ref
from builder.common.programs import CODEGEN, DISPATCH
from builder.images.bases.identify import identify
from builder.images.engines import metadata
from builder.proof.interpreters import Probes, ask_in_container, in_container
from builder.proof.ongpu import run_in_container
from builder.proof.replies import CodegenReply, DispatchReply
from builder.proof.targets import EmbeddedMetadata, ImageProbes, open_overlay, target_of_image

if TYPE_CHECKING:
    from docker.models.containers import Container

    from builder.common.documents.plan import BakedPlan
    from builder.proof.checks import VerifierDocument
    from builder.proof.replies import CodegenRequest, DispatchRequest
    from builder.proof.target import VerifyTarget
    from builder.proof.targets import Opening


#: Empty files that a Docker Engine adds to every container that it creates.
_OF_ENGINE = {
    "/.dockerenv", "/dev/console", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf",
}  # fmt: skip


def open_engine_image(ref: str, opening: Opening) -> VerifyTarget:
    """Open an image in a Docker Engine: an overlay of spark-build, or an image with vLLM."""
    from builder.images.engines import docker

    client = docker.connect()
    try:
        image = docker.find_image(client, ref, opening.platform)
        config = docker.config_of(image)
        with docker.created(client, image.id or ref) as container:
            baked = docker.read_file(container, f"{metadata.SHARE}/plan.json")
            layers = docker.read_file(container, f"{metadata.SHARE}/layers.json")
            plan = metadata.read_plan(baked, ref) if baked else None
            label = config.labels.get(metadata.PLAN_LABEL, "")
            if plan and _stands_alone(plan.document, container):
                exported = docker.export_files(container)
                files = {path: data for path, data in exported if data or path not in _OF_ENGINE}
                opened = open_overlay(ref, plan, files, config.env, opening, label)
                return dataclasses.replace(opened, digests=docker.digests_of(image))
    finally:
        client.close()
    baked_in = EmbeddedMetadata(plan=plan, layers=metadata.read_layers(layers, ref), label=label)
    opened = _open_image(ref, baked_in, opening)
    return dataclasses.replace(opened, digests=docker.digests_of(image))


def _stands_alone(plan: BakedPlan, container: Container) -> bool:
    """Whether an image is only an overlay, without a base image with vLLM."""
    from builder.images.engines import docker

    base = plan.base
    metadata = f"vllm-{base.packages['vllm']}.dist-info/METADATA"
    found = docker.read_file(container, f"{base.site_packages}/{metadata}")
    return base_kind(base.kind).is_wheels and found is None


def _open_image(ref: str, baked: EmbeddedMetadata, opening: Opening) -> VerifyTarget:
    base = identify(opening.request(Ref(ref), baked.layers, engine="buildkit"))

    def ask(request: DispatchRequest) -> DispatchReply:
        return ask_in_container(base, request, DispatchReply, DISPATCH)

    def compile_kernels(request: CodegenRequest) -> CodegenReply:
        return ask_in_container(base, request, CodegenReply, CODEGEN)

    now = Probes(ask=ask, compile=compile_kernels)
    held = ImageProbes(kind="image", now=now, otherwise=in_container(base), engine="buildkit")
    opened = target_of_image(base, ref, baked, opening, held)

    def on_gpu(level: str) -> VerifierDocument:
        return run_in_container(ref, base.identity.interpreter, opened.plan, level, opening.gpu)

    return dataclasses.replace(opened, on_gpu=on_gpu, outside=partial(_files_at, ref, opening))


def _files_at(ref: str, opening: Opening, path: str) -> dict[str, bytes]:
    from builder.images.engines import docker

    client = docker.connect()
    try:
        image = docker.find_image(client, ref, opening.platform)
        with docker.created(client, image.id or ref) as container:
            return docker.files_at(container, path)
    finally:
        client.close()
