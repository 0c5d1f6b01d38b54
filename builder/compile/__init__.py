"""Compile vLLM's CUDA sources, or the few units that a change affects, into an extension wheel.

Everything is read from the release's own source archive and decided by its own CMakeLists.txt.
"""
