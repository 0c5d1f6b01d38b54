"""The options of ``publish`` and ``distribute`` as frozen values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from builder.common import options as opt
from builder.common.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Which image to publish where, and what must be proven of it."""

    source: Annotated[
        str | None,
        Argument("oci:DIR, HOST/NAME@sha256:..., or an image in a Docker Engine.", "IMAGE"),
    ] = None
    to: Annotated[tuple[str, ...], Option("HOST/REPO to publish to; may be repeated.", "HOST/REPO")]
    move_tag: Annotated[
        tuple[str, ...],
        Option("A moving tag to set to this image, such as latest; may be repeated.", "TAG"),
    ] = ()
    evidence: Annotated[
        tuple[Path, ...],
        Option("Evidence from 'verify --json' (default: find it, or verify now).", "FILE"),
    ] = ()
    require: Annotated[
        tuple[str, ...],
        Option(
            "Levels that must have passed (default: static, imports, dispatch).",
            "LEVEL[,LEVEL...]",
            complete="levels",
        ),
    ] = ()
    trust_evidence_key: Annotated[
        str | None,
        Option(
            "Believe evidence in the source repository that is signed with this key.",
            "KEY",
        ),
    ] = None
    mirror_base: Annotated[bool, Option("Also store a copy of the base image.")] = False
    rollback: Annotated[
        str | None, Option("Set this moving tag back to its previous image.", "TAG")
    ] = None
    force: Annotated[bool, Option("Publish an unverified image; its tag says so.")] = False
    overlay: Annotated[bool, Option("Publish an overlay, which cannot run alone.")] = False
    trust_image: opt.TrustImage = False
    dry_run: Annotated[
        bool, Option("Show what would be done, without writing anything.", names="-n")
    ] = False
    json: opt.Json = False


@dataclass(frozen=True, kw_only=True)
class DistributeOptions:
    """Which image to copy to which machines."""

    image: Annotated[
        str, Argument("A tag in Docker, oci:DIR (--thin, too), or HOST/NAME@sha256:...", "IMAGE")
    ]
    hosts: Annotated[tuple[str, ...], Argument("Hosts, as for ssh.", "HOST")]
    tag: Annotated[str | None, Option("Image name on the hosts.", "NAME[:TAG]", "-t")] = None
    ssh: Annotated[str, Option("The SSH command, with options.", "COMMAND")] = "ssh"
    jobs: Annotated[int, Option("Hosts served in parallel.", "N")] = 4
    dry_run: Annotated[bool, Option("Only show what each host lacks.", names="-n")] = False
