"""Tests whose machine code nvcc makes here: real compilers, real linker, seconds each."""
