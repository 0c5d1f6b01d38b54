"""Run PTX kernels on the CPU, and check values, races and deadlocks without a GPU.

`source` parses PTX, `program` decodes it, `grid` runs a launch, `races` checks shared memory.
`registers`, `floats`, `accesses`, `matrices`, `warps` and `calls` implement the instructions;
their semantics are in the sections that they name of NVIDIA's "Parallel Thread Execution ISA".  An
unknown instruction, or an unknown form of one, is an error that names it and its line.
"""
