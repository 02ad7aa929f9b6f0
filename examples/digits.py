"""Handwritten digits: a small convolutional network with batch norm, trained by as many nodes as you start.

    python digits.py --listen 127.0.0.1:7700
    python digits.py --join 127.0.0.1:7700 --dir two

The 1,797 images come with scikit-learn (``pip install scikit-learn``). Each node trains on a random half.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.bootstrap import manifests
from gossamer.node import Peer
from gossamer.node.trainer.data import constant

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("digits.py needs scikit-learn for its images: pip install scikit-learn")

HELD_OUT = 300


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, float32[n, 1, 8, 8] from 0 to 1, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return (
        TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT]),
        TensorDataset(images[-HELD_OUT:], labels[-HELD_OUT:]),
    )


def build_model() -> nn.Module:
    """A model of 10 scores from an image, with the same first parameters on every node."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


@torch.no_grad()
def accuracy(model: nn.Module, seen: Tensor, held_out: TensorDataset) -> float:
    """Share of held-out digits that are recognised.

    Batch norm's statistics are each node's own, and the parameters are now the swarm's: a few forward passes
    over our own images fit the statistics to them.
    """
    model.train()
    for images in seen.split(128):
        model(images)
    model.eval()
    images, labels = held_out.tensors
    right = model(images).argmax(1) == labels
    model.train()
    return float(right.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--manifest", type=Path, default=Path("digits.toml"))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()

    train, held_out = read_digits()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if not options.manifest.exists():
        manifests.write(manifests.describe(model, name="digits", every_seconds=0.5), options.manifest)

    with Peer.attach(
        model,
        optimizer,
        manifest=options.manifest,
        join=options.join,
        listen=options.listen,
        folder=options.dir,
        stop_round=options.rounds,
    ) as peer:
        schedule = constant(warm_up_tokens=2_000)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: peer.lr_scale(schedule))
        shard = peer.shard(train, fraction=0.5)
        loader = DataLoader(train, batch_size=32, sampler=shard)
        mine = train.tensors[0][shard.indices]
        print(f"accuracy before: {accuracy(model, mine, held_out):.3f}", flush=True)
        while not (peer.finished or peer.should_stop):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rates.step()
                peer.step(tokens=len(images), loss=loss)
                if peer.finished or peer.should_stop:
                    break
        peer.finish()
        with peer.average():
            print(f"accuracy of the averaged model: {accuracy(model, mine, held_out):.3f}")
        print(f"accuracy after round {peer.round}: {accuracy(model, mine, held_out):.3f}")


if __name__ == "__main__":
    main()
