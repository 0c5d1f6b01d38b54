"""Run PTX kernels on the CPU, and check values, races and deadlocks without a GPU.

`source` reads PTX, `program` decodes it, `grid` runs a launch of it, `races` watches shared memory.
Each ``ops_`` module holds one family of instructions; what an instruction means stands beside the
title of its section in NVIDIA's "Parallel Thread Execution ISA".  An instruction or a form of one
that no module knows is an error that names it and its line: nothing is guessed.
"""
