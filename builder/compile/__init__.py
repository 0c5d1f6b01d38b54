"""Compiled code: what a release's own build would make of its CUDA sources, and making part of it.

Everything is read from the release's own source archive and decided by its own CMakeLists.txt.
"""
