"""Signs images and checks signatures with ``cosign``."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.common.document import Count, Digest, Document, Text
from builder.errors import EngineError, Exit, RemoteError, SparkBuildError, UsageError
from builder.images.registry.model import parse_json
from builder.images.registry.reference import Options
from builder.images.registry.transport import find_credential

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.images.registry.reference import Reference

#: Statuses of ``cosign verify`` that mean "no signature", "none that matches", and the like.
_NOT_SIGNED = range(10, 15)
_INSTALL = "apt-get install cosign"
#: Seconds that cosign gets without a terminal; it gives up itself after three minutes.
_PATIENCE = 240.0
#: Bytes of its answer that are read, and of its errors; a signature is about 1 kB.
_MOST = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The signer, or the required signer: a key, or an identity with its issuer.

    ``log`` says whether the public transparency log is used; it is optional with a key.
    """

    key: str = ""
    identity: str = ""
    issuer: str = ""
    log: bool = False


class Signed(Document, frozen=True, kw_only=True):
    """An image that was signed."""

    image: Text
    digest: Digest


class SignatureCheck(Document, frozen=True, kw_only=True):
    """An image with a matching signature."""

    image: Text
    digest: Digest
    signatures: Count
    passed: Annotated[bool, Meta(extra_json_schema={"const": True})]


def sign(reference: Reference, trust: Trust) -> Signed:
    """Sign an image by digest, with every image of an index.

    Raises:
        EngineError: cosign is not installed.
        RemoteError: cosign failed.
    """
    words = ["sign", "--yes", "--recursive", *_key(trust.key)]
    if trust.key and not trust.log:
        words.append("--tlog-upload=false")
    done = _run(words, reference)
    if done.returncode:
        raise RemoteError(
            f"cosign did not sign {reference} (status {done.returncode}; an encrypted key needs "
            f"COSIGN_PASSWORD){_said(done)}",
            hint="export COSIGN_PASSWORD=PASSWORD",
        )
    return Signed(image=str(reference), digest=reference.digest)


def verify_signature(reference: Reference, trust: Trust) -> SignatureCheck:
    """Check that this digest has a signature of the given signer, and count them.

    Raises:
        UsageError: neither a key nor an identity with its issuer is given.
        EngineError: cosign is not installed.
        SparkBuildError: there is no such signature (exit 5).
        RemoteError: cosign failed otherwise.
    """
    if trust.key:
        words = ["verify", *_key(trust.key)]
        words += [] if trust.log else ["--insecure-ignore-tlog=true"]
    elif trust.identity and trust.issuer:
        words = ["verify", "--certificate-identity", trust.identity]
        words += ["--certificate-oidc-issuer", trust.issuer]
    else:
        raise UsageError(
            "no expected signer is given: --key, or --identity and --issuer",
            hint="--key cosign.pub",
        )
    done = _run(words, reference)
    if done.returncode in _NOT_SIGNED:
        raise SparkBuildError(
            f"{reference} has no signature that matches{_said(done)}", Exit.VERIFY_FAILED
        )
    if done.returncode:
        raise RemoteError(f"cosign failed (status {done.returncode}){_said(done)}")
    count = _count(done.stdout, reference)
    digest = reference.digest
    return SignatureCheck(image=str(reference), digest=digest, signatures=count, passed=True)


def _count(output: str, reference: Reference) -> int:
    """Count the verified signatures whose payload names this digest."""
    try:
        payloads = parse_json(output)
        named = [p["critical"]["image"]["docker-manifest-digest"] for p in payloads]
    except (ValueError, KeyError, TypeError):
        raise RemoteError(f"cosign's answer for {reference} cannot be parsed") from None
    if not named or any(digest != reference.digest for digest in named):
        seen = ", ".join(map(str, named)) or "nothing"
        raise SparkBuildError(
            f"{reference}: cosign has verified a signature of {seen}", Exit.VERIFY_FAILED
        )
    return len(named)


def _key(key: str) -> list[str]:
    if not key:
        return []
    if "://" not in key and not Path(key).is_file():
        raise UsageError(f"{key} is not a file", hint="cosign generate-key-pair")
    return ["--key", key]


def _run(words: list[str], reference: Reference) -> subprocess.CompletedProcess[str]:
    program = shutil.which("cosign")
    if program is None:
        raise EngineError("cosign is not installed; it is needed for signatures", hint=_INSTALL)
    if reference.host in Options.from_environment().plain_http:
        words = [*words, "--allow-http-registry"]
    asks = sys.stdin is not None and sys.stdin.isatty()
    with _login(reference) as env, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                [program, *words, f"{reference.name}@{reference.digest}"],
                env=env,
                stdin=None if asks else subprocess.DEVNULL,
                stdout=out,
                stderr=None if asks else err,  # where it asks for a password
                timeout=None if asks else _PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RemoteError(
                f"cosign did not answer for {reference} in {_PATIENCE:.0f} s",
                hint=f"try it by hand: cosign {words[0]}",
            ) from None
        except OSError as error:
            raise EngineError(f"{program} cannot be run: {error.strerror}", hint=_INSTALL) from None
        said = [_read(stream, reference) for stream in (out, err)]
    return subprocess.CompletedProcess(done.args, done.returncode, *said)


def _read(stream: IO[bytes], reference: Reference) -> str:
    """What cosign has written to a file.

    Raises:
        RemoteError: it is more than anything that it says about an image.
    """
    stream.seek(0)
    data = stream.read(_MOST + 1)
    if len(data) > _MOST:
        raise RemoteError(f"cosign's answer for {reference} has more than {_MOST >> 20} MiB")
    return data.decode("utf-8", "replace")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or "").splitlines() if line.strip()]
    return f": {lines[-1].removeprefix('Error: ')}" if lines else ""


@contextlib.contextmanager
def _login(reference: Reference) -> Iterator[dict[str, str]]:
    """An environment in which cosign has our credentials.

    It reads Docker's configuration itself; only credentials from our own variables are passed, in a
    file, because other users can read command lines.
    """
    env = dict(os.environ)
    credential = find_credential(reference.host, reference.repository)
    if credential is None or not credential.source.startswith("SPARK_BUILD_"):
        yield env
        return
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        pair = f"{credential.username}:{credential.secret}".encode()
        auth = base64.b64encode(pair).decode()
        file = Path(folder) / "config.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps({"auths": {reference.api_host: {"auth": auth}}}))
        yield {**env, "DOCKER_CONFIG": folder}
