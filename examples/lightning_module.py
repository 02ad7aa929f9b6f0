"""A recurrent network on the source of Python's standard library: Lightning's `Trainer`, and a callback.

    python lightning_module.py --listen 127.0.0.1:7700
    python lightning_module.py --join 127.0.0.1:7700 --dir two

Needs ``pip install 'gossamer[lightning]'``. With ``--devices 2``, two processes are one node.
"""

import argparse
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gossamer.bootstrap import manifests
from gossamer.models.corpus import load_corpus
from gossamer.node.adapters.lightning import GossamerCallback
from gossamer.node.trainer.data import constant

CONTEXT = 64


class Bytes(pl.LightningModule):
    """Predicts the next byte, from batches int64[n, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.recurrent = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 256)

    def loss(self, batch: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(batch[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("held_out", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def windows(text: Tensor) -> Tensor:
    """Text cut up: uint8[n] -> int64[n // CONTEXT, CONTEXT]."""
    return text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--manifest", type=Path, default=Path("bytes.toml"))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(0)
    module = Bytes()
    if "LOCAL_RANK" not in os.environ and not options.manifest.exists():  # in the first process only
        manifests.write(manifests.describe(module, name="bytes", every_steps=20), options.manifest)
    torch.seed()  # each node goes through the text in a different order

    text = load_corpus([], CONTEXT)
    train = DataLoader(windows(torch.from_numpy(text.train)), batch_size=16, shuffle=True)  # type: ignore[arg-type]
    held_out = DataLoader(windows(torch.from_numpy(text.held_out[: 256 * CONTEXT])), batch_size=64)  # type: ignore[arg-type]
    swarm = GossamerCallback(
        manifest=options.manifest,
        join=options.join,
        listen=options.listen,
        folder=options.dir,
        stop_round=options.rounds,
        schedule=constant(warm_up_tokens=50_000),
    )
    trainer = pl.Trainer(
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        devices=options.devices,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        callbacks=[swarm],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = trainer.test(module, held_out, verbose=False)[0]["held_out"]
    trainer.fit(module, train)
    after = trainer.test(module, held_out, verbose=False)[0]["held_out"]
    print(f"held-out loss {before:.3f} -> {after:.3f}, nats a byte")
    if swarm.peer is not None:
        with swarm.peer.average():
            average = trainer.test(module, held_out, verbose=False)[0]["held_out"]
        print(f"of the averaged model: {average:.3f}")


if __name__ == "__main__":
    main()
