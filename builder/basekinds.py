"""What each kind of base is: asked by whoever would tell wheels from images."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BaseKind:
    """What can be done with bases of a kind."""

    name: str
    #: an image, which a build puts layers on
    is_image: bool = False
    #: released wheels, of which a build makes an overlay for any image
    is_wheels: bool = False
    #: an environment of this machine, which ``apply`` patches in place
    is_installed: bool = False

    @property
    def is_built(self) -> bool:
        """Whether an engine makes an image of it."""
        return self.is_image or self.is_wheels


#: Every kind, by its name in plans.
KINDS = {
    kind.name: kind
    for kind in (
        BaseKind(name="image", is_image=True),
        BaseKind(name="pypi", is_wheels=True),
        BaseKind(name="dir", is_installed=True),
    )
}


def base_kind(name: str) -> BaseKind:
    """The kind of that name; one that a plan of another spark-build names is none of ours."""
    return KINDS.get(name) or BaseKind(name=name)
