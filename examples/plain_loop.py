"""A plain PyTorch loop that trains in a swarm: three lines of it are Gossamer's.

python plain_loop.py --listen 127.0.0.1:7700           # founds the swarm, and writes swarm.toml
python plain_loop.py --join 127.0.0.1:7700 --dir two   # in another terminal, as often as you like
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.node import Peer

parser = argparse.ArgumentParser()
parser.add_argument("--join", action="append", default=[])
parser.add_argument("--listen", default="127.0.0.1:0")
parser.add_argument("--manifest", type=Path, default=Path("swarm.toml"))
parser.add_argument("--dir", type=Path)
parser.add_argument("--rounds", type=int, default=0)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if not options.manifest.exists():
    manifests.write(manifests.describe(model, name="plain", every_seconds=0.5), options.manifest)

torch.seed()  # everybody draws other data
with Peer.attach(  # 1
    model,
    optimizer,
    manifest=options.manifest,
    join=options.join,
    listen=options.listen,
    folder=options.dir,
    stop_round=options.rounds,
) as peer:
    while not (peer.finished or peer.should_stop):
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if peer.step(tokens=len(inputs), loss=loss):  # 2
            print(f"round {peer.round}: loss {peer.last_loss:.4f}", flush=True)
    peer.finish()  # 3: the swarm's own model, the same on every node
    print(f"sum of parameters: {sum(p.double().sum().item() for p in model.parameters()):.12f}")
