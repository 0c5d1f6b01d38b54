"""Programs that run away from spark-build: inside an image, in a mod, in a virtual environment.

Every module here uses the standard library only and imports nothing of ours, so that its source
can be copied anywhere as one file.  ``tests/unit/test_runtime_is_standalone.py`` enforces it.
"""
