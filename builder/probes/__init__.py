"""Programs that run inside an image, a container or a virtual environment.

They import the standard library, their siblings and `builder.applier`, and are shipped as one
archive each (`builder.common.programs`); ``wheel_loader`` and ``audit_model`` are shipped as files.
``tests/unit/probes/test_standalone.py`` enforces it.
"""

#: The license terms that images and mods carry beside these programs.
TERMS = ("LICENSE", "NOTICE")
