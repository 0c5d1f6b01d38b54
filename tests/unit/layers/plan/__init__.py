"""Unit tests of ``builder/layers/plan``."""
