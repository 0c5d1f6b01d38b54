"""Unit tests of ``builder/images/engines``."""
