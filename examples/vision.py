"""Handwritten digits by a small ResNet with batch norm: Lightning's `Trainer`, and the right statistics.

    python vision.py --listen 127.0.0.1:7700
    python vision.py --join 127.0.0.1:7700 --dir two

Needs ``pip install 'gossamer[lightning]' scikit-learn``. Batch norm's running statistics are each node's own,
and belong to the parameters that it had while it trained. After a merge, `update_bn` computes them anew for
the swarm's model; from images that all nodes have, so that every node evaluates the very same model.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.bootstrap import manifests
from gossamer.node.adapters.lightning import GossamerCallback

HELD_OUT = 300
CALIBRATION = 512
"""How many training images the statistics are computed from."""


class Residual(nn.Module):
    """Two convolutions with batch norm, beside a shortcut that halves the image."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Conv2d(width, out, 1, stride=2, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class Digits(pl.LightningModule):
    """Recognises a digit, from images float32[n, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(Residual(1, 16), Residual(16, 32), nn.Flatten(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--manifest", type=Path, default=Path("vision.toml"))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(0)
    module = Digits()
    if not options.manifest.exists():
        manifests.write(manifests.describe(module, name="vision", every_steps=20), options.manifest)
    torch.seed()  # each node goes through the images in a different order

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train = DataLoader(TensorDataset(*data[:-HELD_OUT]), batch_size=32, shuffle=True)
    held_out = DataLoader(TensorDataset(*data[-HELD_OUT:]), batch_size=HELD_OUT)
    calibration = images[:CALIBRATION].split(128)

    swarm = GossamerCallback(
        manifest=options.manifest,
        join=options.join,
        listen=options.listen,
        folder=options.dir,
        stop_round=options.rounds,
    )
    trainer = pl.Trainer(
        max_epochs=-1,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        callbacks=[swarm],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def accuracy() -> float:
        return float(trainer.test(module, held_out, verbose=False)[0]["accuracy"])

    update_bn(calibration, module)
    before = accuracy()
    trainer.fit(module, train)
    own = accuracy()
    update_bn(calibration, module)
    print(f"held-out accuracy {before:.4f} -> {accuracy():.4f}")
    print(f"with the statistics of this node's own training: {own:.4f}")
    if swarm.peer is not None:
        with swarm.peer.average():
            update_bn(calibration, module)
            print(f"of the averaged model: {accuracy():.4f}")


if __name__ == "__main__":
    main()
