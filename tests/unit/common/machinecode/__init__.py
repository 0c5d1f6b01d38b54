"""Unit tests of ``builder/common/machinecode``."""
