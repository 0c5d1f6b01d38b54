"""The kinds of layers that can be checked, and their names."""

#: Kinds of layers in the order of the table's columns, and what people call them.
KINDS = {
    "nvfp4-linear": "NVFP4 linear",
    "nvfp4-moe": "NVFP4 MoE",
    "fp8-linear": "FP8 linear, per tensor",
    "fp8-block": "FP8 linear, 128x128 blocks",
    "w4a16-linear": "W4A16 NVFP4 linear",
    "w4a16-moe": "W4A16 NVFP4 MoE",
}
