"""The applier: judges and applies patch layers on a tree of installed Python files.

The same code runs everywhere: in the planner, on files read from wheels or an image; in
``spark-build apply``, on a virtual environment; in an image build; and in a mod, when a container
starts.  Images and mods carry these modules as one file, ``spark_apply.pyz``, so they import only
the standard library and each other, and run on Python 3.10
(``tests/unit/probes/test_standalone.py``).  They do not depend on images, engines or the command
line of spark-build.

Terms: a *layer* is a rendered ``layer.toml`` (a JSON object with every file inlined); a
*tree* is a site-packages directory, real or not; *judging* a layer on a tree gives an `Outcome`
with one of the seven states and the exact new bytes, and writes nothing; *committing* writes
all of them or none, and a receipt.

Bottom to top: ``values``; ``trees``, ``layers``; ``machinecode``; ``states``; ``diff``,
``receipts``; ``edits``, ``sources``; ``ops``, ``store``; ``judging``; ``applying``;
``commandline``.
"""
