"""Run PTX kernels on the CPU, and check values, races and deadlocks without a GPU.

`source` parses PTX, `program` decodes it, `grid` runs a launch, `races` checks shared memory.
Each ``ops_`` module implements one family of instructions; their semantics are in the section
that it names of NVIDIA's "Parallel Thread Execution ISA".  An unknown instruction, or an unknown
form of one, is an error that names it and its line.
"""
