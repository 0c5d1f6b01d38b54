"""What the two ways to read an image share: the survey of its packages, and their tree."""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Protocol

from builder.applier.edits import ENV_PTH
from builder.applier.receipts import env_of, parse_record
from builder.applier.trees import Distribution, OverlayTree, distribution_of
from builder.common.document import Part, read
from builder.common.hints import TEMPORARY, os_hint
from builder.common.plan import BaseIdentity, Platform
from builder.common.wheels import WheelTree
from builder.errors import UsageError
from builder.images.registry.model import parse_json
from builder.images.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.trees import Tree
    from builder.images.registry.model import ImageConfig
    from builder.images.subject import OpenImage


#: Size and mode of a file, and its sha256, which a large file may lack.
FileFacts = tuple[int, int, str | None]


class Survey(Part, frozen=True, kw_only=True):
    """What an image has for a plan: the reply of ``probes/identify_probe.py``.

    Valid for the image's digest and the tracked distributions.
    """

    interpreter: str
    python: str
    machine: str
    site_packages: str
    #: versions and ``site-packages`` folders by distribution
    packages: dict[str, str]
    roots: dict[str, str]
    #: the files of tracked distributions, by path below ``site_packages``
    files: dict[str, FileFacts]
    #: as in :class:`builder.common.plan.BaseIdentity`
    owners: dict[str, list[int]]
    links: dict[str, str]
    folders: dict[str, list[int]]


def survey_of(reply: str, ref: str) -> Survey:
    """The survey in the last line of a probe's output.

    Raises:
        UsageError: the output has no survey.
    """
    try:
        return read(parse_json(reply.strip().rpartition("\n")[2]), Survey)
    except ValueError as error:
        raise UsageError(f"image {ref}: its Python gave no survey of its files: {error}") from None


class ImageFiles(Protocol):
    """Files of an image by absolute path."""

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, or None."""

    def fetch(self, paths: Iterable[str]) -> None:
        """Prepare for reading many files."""

    def copy(self, path: str, out: IO[bytes]) -> bool:
        """Stream a file to ``out``; returns whether it exists."""


class ImageTree:
    """Site-packages of an image, with a known list of files."""

    def __init__(self, site: str, files: Mapping[str, FileFacts], source: ImageFiles) -> None:
        self._site, self._files, self._source = site, files, source
        self._cache: dict[str, bytes | None] = {}
        self._hashed: dict[str, str] = {}

    def read(self, path: str) -> bytes | None:
        if path not in self._files:
            return None
        if path not in self._cache:
            self._cache[path] = self._source.read(f"{self._site}/{path}")
        return self._cache[path]

    def preload(self, paths: Iterable[str]) -> None:
        """Prepare for reading many files."""
        self._source.fetch(f"{self._site}/{path}" for path in paths if path in self._files)

    def extract(self, path: str, target: Path) -> None:
        """Stream one large file to disk.

        Raises:
            UsageError: it cannot be written, or no longer exists.
        """
        try:
            with target.open("wb") as out:
                exists = self._source.copy(f"{self._site}/{path}", out)
        except OSError as error:
            raise UsageError(
                f"cannot write {path} to {target.parent}: {error.strerror}",
                hint=os_hint(error, TEMPORARY),
            ) from error
        if not exists:
            raise UsageError(f"{path} is not in the image")

    def digest(self, path: str) -> str | None:
        if path not in self._files:
            return None
        digest = self._files[path][2]
        if digest is None and path not in self._hashed:  # a large file, as an extension module is
            hasher = _Hasher()
            if self._source.copy(f"{self._site}/{path}", hasher):
                self._hashed[path] = hasher.sha256.hexdigest()
        return digest or self._hashed.get(path)

    def mode(self, path: str) -> int:
        return self._files[path][1]

    @cached_property
    def _children(self) -> dict[str, set[str]]:
        children: dict[str, set[str]] = {}
        for path in self._files:
            parts = path.split("/")
            for depth, name in enumerate(parts):
                children.setdefault("/".join(parts[:depth]), set()).add(name)
        return children

    def children(self, directory: str) -> list[str]:
        return sorted(self._children.get(directory, ()))

    def distributions(self) -> dict[str, Distribution]:
        distributions = {}
        for name in self.children(""):
            dist = distribution_of(name)
            if dist is not None and f"{name}/METADATA" in self._files:
                distributions[dist.name] = dist
        return distributions


class _Hasher(io.BytesIO):
    """Computes the sha256 of written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """An image as its engine or registry describes it."""

    ref: str
    digest: str
    config: ImageConfig
    created: str


def image_base(
    facts: ImageFacts,
    survey: Survey,
    source: ImageFiles,
    image: OpenImage,
) -> Subject:
    """A base from the survey of an image.

    Raises:
        UsageError: its packages are in several directories.
    """
    site = survey.site_packages
    scattered = {name: root for name, root in survey.roots.items() if root != site}
    if scattered:
        listed = ", ".join(f"{name} in {root}" for name, root in scattered.items())
        raise UsageError(
            f"{facts.ref}: vllm is in {site}, but {listed}; layers patch one directory"
        )
    env = facts.config.env
    tree = ImageTree(site, survey.files, source)
    if tree.read(ENV_PTH) is not None:  # a mod ran here: its settings reach every Python
        env = {**env_of(tree), **env}
    identity = BaseIdentity(
        kind="image",
        ref=facts.ref,
        digest=facts.digest,
        platform=Platform.parse(survey.machine, survey.python),
        site_packages=site,
        packages=survey.packages,
        env=env,
        interpreter=survey.interpreter,
        folders=survey.folders,
        links=survey.links,
        owners=survey.owners,
        user=facts.config.user,
        created=facts.created,
    )
    return Subject(identity, tree, image, close=image.close)


# ------------------------------------------------------------------------------ is RECORD complete?


_SHA256 = 64
_REINSTALL = "use a base where pip or uv installed vllm from a wheel"


def recorded(data: bytes | None, where: str) -> list[str]:
    """The paths in the RECORD of a distribution whose ``.dist-info`` is at ``where``.

    Raises:
        UsageError: it is damaged; or it is vLLM's, and is missing or incomplete.
    """
    info = where.rpartition("/")[2]
    dist = distribution_of(info)
    ours = dist is not None and dist.name == "vllm"
    if data is None:
        if ours:
            raise UsageError(f"{where} has no RECORD, so its files are unknown", hint=_REINSTALL)
        return []
    try:
        rows = parse_record(data)
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{where}/RECORD is damaged: {error}") from None
    for number, row in enumerate(rows, 1):
        if not row.path or (row.sha256 is not None and len(row.sha256) != _SHA256):
            raise UsageError(f"{where}/RECORD is damaged: row {number} ({row.path[:80]!r})")
    paths = [row.path for row in rows]
    if ours and not (f"{info}/RECORD" in paths and any(p.startswith("vllm/") for p in paths)):
        raise UsageError(
            f"{where}/RECORD is damaged, or not that of a wheel: its {len(rows)} rows do not name "
            "both files below vllm/ and RECORD itself",
            hint=_REINSTALL,
        )
    return paths


def check_vllm(tree: Tree, where: str) -> None:
    """Refuse site-packages whose vLLM has an incomplete RECORD.

    Raises:
        UsageError: its RECORD does not list all of vLLM.
    """
    dist = tree.distributions().get("vllm")
    if dist is None:
        raise UsageError(
            f"{where}: the RECORD of vllm is missing or damaged: it does not name its own METADATA",
            hint=_REINSTALL,
        )
    recorded(tree.read(f"{dist.info_dir}/RECORD"), f"{where}/{dist.info_dir}")


def preload(tree: object, paths: Sequence[str]) -> None:
    """Prepare for reading many files of a tree, if that is cheaper."""
    if isinstance(tree, OverlayTree):
        below = [path for path in paths if path not in tree.changes]
        preload(tree.base, below)
    elif isinstance(tree, WheelTree | ImageTree):
        tree.preload(paths)
