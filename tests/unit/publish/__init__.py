"""Unit tests of ``builder/publish``."""
