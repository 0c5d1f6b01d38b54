"""``spark-build sign`` and ``spark-build verify-signature``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import console, print_json
from builder.images.registry.copy import Locations
from builder.images.registry.reference import parse_reference
from builder.publishing.cosign import Trust, sign, verify_signature

if TYPE_CHECKING:
    from builder.images.registry.reference import Reference


def pinned(text: str) -> Reference:
    """The reference with the digest that its tag has now.

    Raises:
        UsageError: it is not a reference.
        RemoteError: it does not exist.
    """
    reference = parse_reference(text)
    if reference.digest:
        return reference
    with Locations() as places:
        repository = places.registry(reference.host).repository(reference.repository)
        found = reference.at(repository.manifest(reference.tag).digest)
    console.say(f"  {text} is {found.digest}")
    return found


def sign_command(*, image: str, key: str | None, log: bool, json: bool) -> None:
    """Sign an image by digest."""
    reference = pinned(image)
    with console.step(f"sign {reference}"):
        signed = sign(reference, Trust(key=key or "", log=log or not key))
    if json:
        print_json(signed)
    else:
        print(reference)


def verify_signature_command(
    *,
    image: str,
    key: str | None,
    identity: str | None,
    issuer: str | None,
    log: bool,
    json: bool,
) -> None:
    """Check an image's signature; exit 5 if none matches."""
    reference = pinned(image)
    trust = Trust(key=key or "", identity=identity or "", issuer=issuer or "", log=log)
    with console.step(f"verify the signature of {reference}"):
        checked = verify_signature(reference, trust)
    if json:
        print_json(checked)
    else:
        print(reference)
