"""What every test session needs."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from builder.bootstrap import environment, use_ordinary_pip
from tests.documents import watch

if TYPE_CHECKING:
    from collections.abc import Iterator

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a background job ignores SIGINT, and so would every program that a test starts to interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

use_ordinary_pip(environment())


@pytest.fixture(autouse=True, scope="session")
def _documents_are_as_published() -> Iterator[None]:
    """Whatever a test looks at in a JSON document, the rest of it is held against its schema."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        yield
