"""Tests of ``builder/images/rootfs``."""
