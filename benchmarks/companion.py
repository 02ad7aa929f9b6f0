"""Another node for `waiting`: it publishes whenever the swarm's clock moves, and computes next to nothing.

Run as ``python -m benchmarks.companion PARAMETERS MANIFEST FOLDER ADDRESS``; ends on SIGTERM.
"""

import sys
import time
from pathlib import Path

import torch

from benchmarks.waiting import begun, build
from gossamer.node import Peer

LOOK_S = 0.02


def main() -> None:
    parameters, manifest, folder, address = sys.argv[1:]
    torch.set_num_threads(1)
    model = build(int(parameters))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Peer.attach(
        model,
        optimizer,
        manifest=Path(manifest),
        join=[address],
        folder=Path(folder),
        listen="127.0.0.1:0",
        plaintext=True,
    ) as peer:
        first = next(model.parameters())
        begun(Path(folder)).touch()
        while not peer.should_stop:
            time.sleep(LOOK_S)
            if peer.clock > peer.round:  # it follows the clock, and never moves it
                with torch.no_grad():
                    first.add_(1e-4)
                peer.step(tokens=1, loss=1.0)


if __name__ == "__main__":
    main()
