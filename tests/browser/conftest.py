"""Fixtures: one browser for all the tests of a session."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.engine import debs

from .chromium import Chromium, find

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The browser, and letters for it to draw.
PACKAGES = ("chromium", "fonts-dejavu-core")


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """The browser on PATH, or Debian's, installed where we may."""
    if find() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        debs.install(*PACKAGES)
    program = find()
    if program is None:
        reason = f"no Chromium: apt-get install {' '.join(PACKAGES)}, as root"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with Chromium(program) as running:
        yield running
