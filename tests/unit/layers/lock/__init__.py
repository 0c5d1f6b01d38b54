"""Unit tests of ``builder/layers/lock``."""
