"""Unit tests of ``builder/proof/recorded``."""
