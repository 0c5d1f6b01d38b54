"""The tool where its users run it: on 64-bit Arm, emulated."""
