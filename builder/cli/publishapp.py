"""The options of what publishes images; what its commands do is imported when they run."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads annotations when it runs
from typing import Annotated

import typer

from builder.cli import options as opt  # noqa: TC001 - typer reads annotations when it runs

publish_app = typer.Typer()


@publish_app.command(
    epilog="Examples:  spark-build publish oci:out --to ghcr.io/me/vllm-spark --dry-run   |   "
    "spark-build publish oci:out --to ghcr.io/me/vllm-spark --move-tag latest   |   "
    "spark-build publish --rollback latest --to ghcr.io/me/vllm-spark"
)
def publish(
    to: Annotated[
        list[str],
        typer.Option("--to", help="HOST/REPO to publish to; may be repeated.", metavar="HOST/REPO"),
    ],
    source: Annotated[
        str | None,
        typer.Argument(help="oci:DIR, HOST/NAME@sha256:..., or an image in a Docker Engine."),
    ] = None,
    move_tag: Annotated[
        list[str] | None,
        typer.Option(help="A moving tag to give to this image, such as latest; may be repeated."),
    ] = None,
    evidence: Annotated[
        list[Path] | None,
        typer.Option(help="What 'verify --json' wrote about this image (default: find, or verify)"),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(help="Levels that must have passed (default: static, imports, dispatch)."),
    ] = None,
    mirror_base: Annotated[
        bool, typer.Option("--mirror-base", help="Keep a copy of the base image beside it.")
    ] = False,
    rollback: Annotated[
        str | None, typer.Option(help="Give this moving tag back to its previous image.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Publish what is not verified, with that in its tag."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be done; write nothing.")
    ] = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Publish a verified image under an immutable tag, with what proves it."""
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
            dry_run=dry_run,
            json=json,
        )
    )


@publish_app.command(
    epilog="Examples:  spark-build tags ghcr.io/me/vllm-spark   |   "
    "spark-build tags ghcr.io/me/vllm-spark --prune --keep 5 --dry-run"
)
def tags(
    repository: Annotated[str, typer.Argument(help="HOST/REPO", metavar="HOST/REPO")],
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Delete what is older; never what a moving tag names."),
    ] = False,
    keep: Annotated[
        int | None, typer.Option(help="Images of each profile that stay, the newest first.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be deleted.")
    ] = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """List what was published: plan, base, layers, date, proof and size of each image."""
    from builder.cli.tags import tags_command

    tags_command(repository=repository, prune_old=prune, keep=keep, dry_run=dry_run, json=json)


Key = Annotated[
    str | None, typer.Option("--key", help="Key file or KMS address (default: keyless).")
]
Log = Annotated[
    bool,
    typer.Option("--log", help="Use the public transparency log with a key, too."),
]
Published = Annotated[str, typer.Argument(help="HOST/NAME:TAG or HOST/NAME@sha256:...")]


@publish_app.command(
    epilog="Example:  COSIGN_PASSWORD=... spark-build sign ghcr.io/me/vllm-spark:latest "
    "--key cosign.key"
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
    epilog="Example:  spark-build verify-signature ghcr.io/me/vllm-spark:latest --key cosign.pub",
)
def verify_signature(
    image: Published,
    key: Key = None,
    identity: Annotated[
        str | None, typer.Option(help="Keyless: who signed, such as a workflow's address.")
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(help="Keyless: who vouches for that identity.")
    ] = None,
    log: Log = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Check who signed an image, with cosign; exit 5 when no signature matches."""
    from builder.cli.sign import verify_signature_command

    verify_signature_command(
        image=image, key=key, identity=identity, issuer=issuer, log=log, json=json
    )


@publish_app.command(
    epilog="Examples:  spark-build rebuild oci:out   |   "
    "spark-build rebuild ghcr.io/me/vllm@sha256:...   Exit 0: the same digest; 5: it differs."
)
def rebuild(
    image: Annotated[
        str, typer.Argument(help="oci:DIR, HOST/NAME@sha256:..., or an image in a Docker Engine.")
    ],
    engine: Annotated[str, typer.Option(help="oci, the one that gives the same bytes.")] = "oci",
    base: Annotated[
        str | None,
        typer.Option(help="Where the base image is kept now (default: where the plan had it)."),
    ] = None,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Make an image again from the plan and layers that it carries, and compare byte for byte."""
    from builder.cli.rebuild import rebuild_command

    rebuild_command(image=image, engine=engine, base=base, refresh=refresh, json=json)


@publish_app.command(
    epilog="Examples:  spark-build distribute oci:out spark-1 spark-2   |   "
    "spark-build distribute ghcr.io/me/vllm@sha256:... me@spark-1 --tag vllm-spark:b12x --dry-run"
)
def distribute(
    image: Annotated[str, typer.Argument(help="oci:DIR (--thin, too), or HOST/NAME@sha256:...")],
    hosts: Annotated[
        list[str], typer.Argument(help="Nodes, as SSH knows them.", metavar="HOST...")
    ],
    tag: Annotated[
        str | None, typer.Option("--tag", "-t", help="What to call it on the nodes.")
    ] = None,
    ssh: Annotated[str, typer.Option(help="The SSH program, with options of yours.")] = "ssh",
    jobs: Annotated[int, typer.Option(help="Nodes served at once.")] = 4,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only ask each node what it lacks.")
    ] = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Bring an image to machines over SSH: each fetches only the layers that it lacks."""
    from builder.cli.distribute import distribute_command

    distribute_command(
        image=image, hosts=hosts, tag=tag, ssh=ssh, jobs=jobs, dry_run=dry_run, json=json
    )
