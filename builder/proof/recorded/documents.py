"""Records of selected kernels, as printed by ``dispatch ask`` and kept in docs/evidence."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from builder.common.document import Count, Digest, Document, Part, Text, always
from builder.common.documents.plan import State
from builder.proof.checks import Check
from builder.proof.recorded import Outcome


class AskedBase(Part, frozen=True, kw_only=True):
    """The wheels of a record."""

    platform: Text
    digest: Digest
    packages: dict[str, Text]


class WithProfile(Part, frozen=True, kw_only=True):
    """Kernels that a release selects with a profile; empty without support by the profile."""

    inputs: Annotated[Text, Meta(description="identity of the profile's layers, pins and range")]
    not_served: Text = field(default="", name="not-served")
    layers: dict[str, State] | None = None
    env: dict[str, str] | None = None
    flags: tuple[Text, ...] | None = None
    kinds: dict[str, Outcome] | None = None


class Alone(Part, frozen=True, kw_only=True):
    """Kernels of an unpatched release, by default and with each of its choices."""

    default: dict[str, Outcome]
    choices: Annotated[
        dict[str, dict[str, Text | Outcome]],
        Meta(description="by kind of layer and choice; a kernel is given by its name"),
    ]
    simulated: tuple[Text, ...]
    real: tuple[Text, ...]

    def outcomes(self, kind: str) -> dict[str, Outcome]:
        """The result of each choice of a kind."""
        found = self.choices[kind].items()
        return {c: Outcome(selected=o) if isinstance(o, str) else o for c, o in found}


class Record(Alone, frozen=True, kw_only=True):
    """All results of one release."""

    schema: Literal[1] = always(1)
    vllm: Text
    base: AskedBase
    profiles: dict[str, WithProfile]

    def kinds(self, profile: str) -> dict[str, Outcome] | None:
        """The result for each kind of layer with a profile; None without support by the profile."""
        found = self.profiles.get(profile)
        return found.kinds if found else None


class Records(Document, frozen=True, kw_only=True):
    """Selected kernels of releases, as stored in docs/evidence."""

    records: Annotated[tuple[Record, ...], Meta(min_length=1)]


class TableFile(Document, frozen=True, kw_only=True):
    """The release table that was written, or checked."""

    file: Text
    releases: Annotated[Count, Meta(description="rows of the table")]
    written: Annotated[bool, Meta(description="false with --check")]


class MatrixRow(Part, frozen=True, kw_only=True):
    """The state of each layer on one release."""

    vllm: Text
    states: dict[str, State]
    reasons: dict[str, str]
    served: Annotated[bool, Meta(description="whether the profile is for this release")]
    dispatch: Annotated[
        tuple[Check, ...] | None, Meta(description="with --dispatch: what it selects on SM121")
    ] = None
    choices: Annotated[
        dict[str, dict[str, Outcome]] | None,
        Meta(
            description="with --choices: what the unpatched release does by kind of layer and "
            "choice; the empty choice means that nothing is set"
        ),
    ] = None


class Matrix(Document, frozen=True, kw_only=True):
    """Layers x releases."""

    layers: tuple[Text, ...]
    rows: tuple[MatrixRow, ...]
