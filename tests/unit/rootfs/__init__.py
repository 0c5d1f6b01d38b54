"""Unit tests of ``builder/rootfs``."""
