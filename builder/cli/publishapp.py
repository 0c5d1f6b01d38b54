"""Options of ``publish``, ``tags``, ``sign``, ``rebuild`` and ``distribute``."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import typed as opt
from builder.cli.command import App, examples
from builder.cli.commands import PUBLISH

publish_app = App()


@publish_app.command(
    rich_help_panel=PUBLISH,
    epilog=examples(
        "spark-build publish oci:out --to ghcr.io/me/vllm-spark --dry-run",
        "spark-build publish oci:out --to ghcr.io/me/vllm-spark --move-tag latest",
        "spark-build publish --rollback latest --to ghcr.io/me/vllm-spark",
    ),
)
def publish(
    to: Annotated[
        list[str],
        typer.Option("--to", help="HOST/REPO to publish to; may be repeated.", metavar="HOST/REPO"),
    ],
    source: Annotated[
        str | None,
        typer.Argument(
            help="oci:DIR, HOST/NAME@sha256:..., or an image in a Docker Engine.", metavar="IMAGE"
        ),
    ] = None,
    move_tag: Annotated[
        list[str] | None,
        typer.Option(
            help="A moving tag to set to this image, such as latest; may be repeated.",
            metavar="TAG",
        ),
    ] = None,
    evidence: Annotated[
        list[Path] | None,
        typer.Option(
            help="Evidence from 'verify --json' (default: find it, or verify now).",
            metavar="FILE",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="Levels that must have passed (default: static, imports, dispatch).",
            metavar="LEVEL[,LEVEL...]",
            autocompletion=complete.levels,
        ),
    ] = None,
    mirror_base: Annotated[
        bool, typer.Option("--mirror-base", help="Also store a copy of the base image.")
    ] = False,
    rollback: Annotated[
        str | None,
        typer.Option(help="Set this moving tag back to its previous image.", metavar="TAG"),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Publish an unverified image; its tag says so."),
    ] = False,
    overlay: Annotated[
        bool,
        typer.Option("--overlay", help="Publish an overlay, which cannot run alone."),
    ] = False,
    trust_image: opt.TrustImage = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Show what would be done, without writing anything."),
    ] = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Publish a verified image together with its evidence.

    The image gets an immutable tag, evidence, provenance and a bill of materials.
    """
    from builder.cli.publish import PublishOptions, publish_command

    publish_command(
        PublishOptions(
            source=source,
            to=to,
            move_tag=move_tag or [],
            evidence=evidence or [],
            require=require or [],
            mirror_base=mirror_base,
            rollback=rollback,
            force=force,
            overlay=overlay,
            trust_image=trust_image,
            dry_run=dry_run,
            json=json,
        )
    )


@publish_app.command(
    rich_help_panel=PUBLISH,
    epilog=examples(
        "spark-build tags ghcr.io/me/vllm-spark",
        "spark-build tags ghcr.io/me/vllm-spark --prune --keep 5 --dry-run",
    ),
)
def tags(
    repository: Annotated[str, typer.Argument(help="HOST/REPO", metavar="HOST/REPO")],
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Delete older images, but never one that another tag names."),
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(help="Number of newest images to keep for each profile.", metavar="N"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would be deleted.")
    ] = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """List published images, and delete old ones.

    Shows plan, base, layers, date, proof and size of each image.
    """
    from builder.cli.tags import tags_command

    tags_command(repository=repository, prune_old=prune, keep=keep, dry_run=dry_run, json=json)


Key = Annotated[
    str | None,
    typer.Option("--key", help="Key file or KMS address (default: keyless).", metavar="KEY"),
]
Log = Annotated[
    bool,
    typer.Option("--log", help="Use the public transparency log even with a key."),
]
Published = Annotated[
    str, typer.Argument(help="HOST/NAME:TAG or HOST/NAME@sha256:...", metavar="IMAGE")
]


@publish_app.command(
    rich_help_panel=PUBLISH,
    epilog=examples(
        "spark-build sign ghcr.io/me/vllm-spark:latest --key cosign.key",
        note="cosign reads the key's password from COSIGN_PASSWORD, or asks for it.",
    ),
)
def sign(
    image: Published,
    key: Key = None,
    log: Log = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Sign a published image by digest, with cosign."""
    from builder.cli.sign import sign_command

    sign_command(image=image, key=key, log=log, json=json)


@publish_app.command(
    "verify-signature",
    rich_help_panel=PUBLISH,
    epilog=examples("spark-build verify-signature ghcr.io/me/vllm-spark:latest --key cosign.pub"),
)
def verify_signature(
    image: Published,
    key: Key = None,
    identity: Annotated[
        str | None,
        typer.Option(
            help="Keyless: the signer's identity, such as a workflow URL.", metavar="IDENTITY"
        ),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(help="Keyless: the issuer of that identity.", metavar="URL")
    ] = None,
    log: Log = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Check who signed an image, with cosign.

    Exit 5: no signature matches.
    """
    from builder.cli.sign import verify_signature_command

    verify_signature_command(
        image=image, key=key, identity=identity, issuer=issuer, log=log, json=json
    )


@publish_app.command(
    rich_help_panel=PUBLISH,
    epilog=examples(
        "spark-build rebuild oci:out",
        "spark-build rebuild ghcr.io/me/vllm@sha256:...",
        note="Exit 0: same digest; 5: different.",
    ),
)
def rebuild(
    image: Annotated[
        str,
        typer.Argument(
            help="oci:DIR, HOST/NAME@sha256:..., or an image in a Docker Engine.", metavar="IMAGE"
        ),
    ],
    engine: Annotated[
        str,
        typer.Option(
            help="oci, the only engine with reproducible bytes.",
            metavar="oci",
            autocompletion=complete.one_of("oci"),
        ),
    ] = "oci",
    base: Annotated[
        str | None,
        typer.Option(
            help="Where the base image is now (default: as in the plan).",
            metavar="BASE",
        ),
    ] = None,
    patches: opt.Patches = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Run hooks of your own layers without confirmation.")
    ] = False,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Rebuild an image from its own metadata, and compare.

    Uses the plan and layers inside the image, and compares byte for byte.
    """
    from builder.cli.rebuild import rebuild_command

    rebuild_command(
        image=image,
        engine=engine,
        base=base,
        patches=patches or (),
        yes=yes,
        refresh=refresh,
        json=json,
    )


@publish_app.command(
    rich_help_panel=PUBLISH,
    epilog=examples(
        "spark-build distribute vllm-spark spark-2",
        "spark-build distribute oci:out spark-1 spark-2",
        "spark-build distribute oci:out me@spark-1 --tag vllm-spark:b12x --dry-run",
    ),
)
def distribute(
    image: Annotated[
        str,
        typer.Argument(
            help="A tag in Docker, oci:DIR (--thin, too), or HOST/NAME@sha256:...", metavar="IMAGE"
        ),
    ],
    hosts: Annotated[list[str], typer.Argument(help="Hosts, as for ssh.", metavar="HOST")],
    tag: Annotated[
        str | None,
        typer.Option("--tag", "-t", help="Image name on the hosts.", metavar="NAME[:TAG]"),
    ] = None,
    ssh: Annotated[
        str, typer.Option(help="The SSH command, with options.", metavar="COMMAND")
    ] = "ssh",
    jobs: Annotated[int, typer.Option(help="Hosts served in parallel.", metavar="N")] = 4,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only show what each host lacks.")
    ] = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Copy an image to machines over SSH.

    Each machine fetches only the layers that it lacks.
    """
    from builder.cli.distribute import distribute_command

    distribute_command(
        image=image, hosts=hosts, tag=tag, ssh=ssh, jobs=jobs, dry_run=dry_run, json=json
    )
