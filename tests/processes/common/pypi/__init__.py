"""Tests of ``builder/common/pypi`` with a server, or with a limit on memory."""
