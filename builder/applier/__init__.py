"""The applier: judges and applies patch layers on a tree of installed Python files.

It is used unchanged everywhere: by the planner on files read out of wheels or an image, by
``spark-build apply`` on a virtual environment, in an image build, and by a mod when a container
starts.  Images and mods carry these modules as one file, ``spark_apply.pyz``
(`builder.engines.toolfiles`), so they import the standard library and each other alone, and run on
Python 3.10 (``tests/unit/runtime/test_standalone.py``).  They know nothing of images, engines and
spark-build's own command line.

The vocabulary: a *layer* is a rendered ``layer.toml`` (a JSON object with every file inlined); a
*tree* is a site-packages directory, real or not; *judging* a layer on a tree gives an `Outcome`
with one of the seven states and the exact new bytes, and writes nothing; *committing* writes them,
all or nothing, and leaves a receipt.

Bottom to top: ``digests``, ``failures``, ``states``, ``text`` (leaves for everybody); ``versions``,
``trees``, ``records``, ``outcomes``, ``receipts``; ``sources``, ``wheels``, ``index``,
``machinecode``; ``diff``, ``hunks``, ``edits``, ``files``, ``environment``; ``ops``, ``variants``,
``judging``, ``sequence``; ``journal``, ``store``, ``applying``, ``finishing``; ``commandline``.
"""
