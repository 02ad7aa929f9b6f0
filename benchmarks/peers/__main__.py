"""Runs cells by name, for development: each one's figures, and its folder in benchmarks/out/."""

import json
import sys

import torch

from benchmarks.peers.cell import REPO, run
from benchmarks.peers.matrix import FULL, cells

torch.set_num_threads(1)
known = {cell.name: cell for cell in cells()}
for name in sys.argv[1:]:
    found = run(known[name], FULL, keep=REPO / "benchmarks/out" / name)
    print(json.dumps(found), flush=True)
