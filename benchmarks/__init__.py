"""Measurements that anyone can repeat: ``python -m benchmarks [NAME...] [--quick]``.

Machines are noisy, so every figure is also given as a ratio to something measured in the same run. Nothing
here is a test, and no test asserts a time. Everything is measured on one core, as a node's daemon works.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is first imported
