"""Tests of ``builder/pypi`` with a server, or with a limit on memory."""
