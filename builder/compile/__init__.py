"""Compile vLLM's CUDA sources, or the few units that a change affects, into an extension wheel.

Sources come from the release's archive, and its CMakeLists.txt decides what is compiled.
"""
