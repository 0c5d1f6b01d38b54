"""What every test session needs."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from builder.bootstrap import environment, use_ordinary_pip
from tests.documents import make_iri_grammar_late, watch

if TYPE_CHECKING:
    from collections.abc import Iterator

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a background job ignores SIGINT, and so would every program that a test starts to interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # as ``nohup`` has it, which is meant for this run: what tests start does not ignore a hang-up
    signal.signal(signal.SIGHUP, lambda *_: None)

use_ordinary_pip(environment())
make_iri_grammar_late()
# as in builder.bootstrap: else each program that a test starts compiles all its modules again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# a process that imported a release would outlive the test that asked it
os.environ["SPARK_BUILD_SERVER_IDLE"] = "0"


def pytest_collection_finish() -> None:
    """What was collected lives to the end: the garbage collector need not look at it again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _documents_are_as_published() -> Iterator[None]:
    """Whatever a test looks at in a JSON document, the rest of it is held against its schema."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        yield
