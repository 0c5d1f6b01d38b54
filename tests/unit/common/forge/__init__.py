"""Unit tests of ``builder/common/forge``."""
