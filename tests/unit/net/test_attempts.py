"""How often something is tried, and how long the pauses are."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from builder.net.attempts import Attempts, seconds_asked


def test_the_last_failure_has_no_pause() -> None:
    attempts = Attempts(3, lambda failures: 10.0 * failures)
    assert (attempts.failed(), attempts.at_last) == (10.0, False)
    assert (attempts.failed(), attempts.at_last) == (20.0, True)
    assert attempts.failed() is None


def test_progress_resets_the_number_of_attempts() -> None:
    attempts = Attempts(2, float)
    assert attempts.failed() == 1.0
    attempts.forget()
    assert (attempts.failed(), attempts.failed()) == (1.0, None)


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), (" 0 ", 0.0), ("", None), ("soon", None), ("-1", None)]
)
def test_delay_requested_by_a_server(value: str, seconds: float | None) -> None:
    assert seconds_asked(value) == seconds


def test_a_date_is_converted_to_a_delay() -> None:
    asked = seconds_asked(formatdate(time.time() + 1000, usegmt=True))
    assert asked is not None
    assert 900 < asked <= 1000
    assert seconds_asked(formatdate(0, usegmt=True)) == 0.0
