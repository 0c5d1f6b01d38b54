"""Tests of ``builder/layers/lock``."""
