"""The platforms that images are made for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from builder.applier.outcomes import Target
from builder.errors import UsageError

#: One table for architecture names: OCI architecture -> uname machine.
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
#: Architecture -> spellings of its default variant.
_DEFAULTS = {"arm64": ("v8", "8", "v8.0"), "amd64": ("v1",)}
_ALIASES = {"aarch64": "arm64", "x86_64": "amd64", "x86-64": "amd64", "arm64v8": "arm64"}


def is_default(architecture: str, variant: str) -> bool:
    """Whether a variant is the architecture's default."""
    return variant in _DEFAULTS.get(architecture, ())


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The platform of an image: an OCI platform and a CPython tag (``cp312``)."""

    architecture: str = "arm64"
    python: str = "cp312"

    @classmethod
    def parse(cls, text: str, python: str = "3.12") -> Platform:
        """From ``linux/arm64``, ``linux/arm64/v8`` (or a machine name) and ``3.12`` (or ``cp312``).

        Raises:
            UsageError: vLLM has no wheels for the platform.
        """
        name, _, variant = text.removeprefix("linux/").partition("/")
        architecture = _ALIASES.get(name, name)
        if architecture not in _MACHINES:
            raise UsageError(f"platform {text!r} is not linux/arm64 or linux/amd64")
        if variant and not is_default(architecture, variant):
            raise UsageError(
                f"platform {text!r}: variant {variant} of {architecture} is not supported; "
                f"runtimes on a DGX Spark request linux/arm64 (NAME@sha256:... selects any image)",
                hint=f"--platform linux/{architecture}",
            )
        digits = re.fullmatch(r"(?:cp)?(\d)\.?(\d+)", python)
        if not digits:
            raise UsageError(f"python {python!r} is not of the form 3.12")
        return cls(architecture=architecture, python=f"cp{digits[1]}{digits[2]}")

    @property
    def oci(self) -> str:
        """``linux/arm64``."""
        return f"linux/{self.architecture}"

    @property
    def machine(self) -> str:
        """``aarch64``, as in uname and wheel tags."""
        return _MACHINES[self.architecture]

    @property
    def python_version(self) -> tuple[int, int]:
        """``(3, 12)``."""
        return int(self.python[2]), int(self.python[3:])

    @property
    def target(self) -> Target:
        """The same for the applier."""
        return Target(self.oci, self.python)
