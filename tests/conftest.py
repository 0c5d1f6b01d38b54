"""What every test session needs."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a background job ignores SIGINT, and so would every program that a test starts to interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
