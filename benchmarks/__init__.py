"""Measurements that anyone can repeat: ``python -m benchmarks [NAME...] [--quick]``.

Machines are noisy, so every figure is also given as a ratio to something measured in the same run. None of
this is a test, and no test asserts a time.

A benchmark is a module with a line in `catalogue`:

* ``run(*, quick: bool)`` measures, and returns figures that JSON can hold;
* ``tables(figures) -> list[Table]`` shows them, on the terminal and in docs/benchmarks.md;
* ``GOALS``, a tuple of `goals.Goal`: what was to be reached, and why it was not, where it was not;
* ``plot(figures, folder)`` writes SVGs named after it, NAME.svg or NAME-more.svg, by `plots.save`.

The last three may be missing. The text of a section is written by hand in docs/benchmarks/SECTION.md. The
report replaces ``<!-- figures: NAME -->`` in it with that benchmark's tables and plots.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is first imported
