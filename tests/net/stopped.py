"""A training script that `test_stop.py` stops with a signal, in a place where its loop's next step is far.

    python -m tests.net.stopped MODE FOLDER

It makes a file ``far`` beside FOLDER once it is there. Modes: ``loop`` and ``transformers`` are in a long
evaluation; ``own`` (with a handler of its own for SIGTERM) and ``lightning`` wait for workers of a
DataLoader, which the signal ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gossamer.bootstrap import manifests
from gossamer.node import Peer

STEPS = 5


class Rows(Dataset[dict[str, Tensor]]):
    """Random rows. From the row `slow` on, each takes a minute."""

    def __init__(self, far: Path, slow: int) -> None:
        self.far, self.slow = far, slow

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.slow:
            self.far.touch()
            for _ in range(600):
                time.sleep(0.1)
        return {"inputs": torch.randn(8), "targets": torch.ones(1)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(inputs) - targets).square().mean()}


def train(mode: str, folder: Path) -> None:
    far, model = folder.with_name("far"), Model()
    manifest = manifests.describe(model, name="stopped", every_steps=100_000, fragments=1)
    options: dict[str, Any] = {"manifest": manifest, "folder": folder, "listen": "127.0.0.1:0"}
    rows, slow = Rows(far, 1000), Rows(far, 0)
    if mode == "transformers":
        from transformers import Trainer, TrainingArguments

        from gossamer.node.adapters.transformers import GossamerCallback as OfTransformers

        arguments = TrainingArguments(
            str(folder.with_name("out")),
            max_steps=1000,
            eval_strategy="steps",
            eval_steps=STEPS,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            remove_unused_columns=False,
        )
        swarm = OfTransformers(**options)
        Trainer(model, arguments, train_dataset=rows, eval_dataset=slow, callbacks=[swarm]).train()
    elif mode == "lightning":
        import lightning.pytorch as pl

        from gossamer.node.adapters.lightning import GossamerCallback as OfLightning

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, index: int) -> Tensor:
                return self.model(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters())

        module = Module()
        options["manifest"] = manifests.describe(module, name="stopped", every_steps=100_000, fragments=1)
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[OfLightning(**options)]
        )
        trainer.fit(module, DataLoader(Rows(far, STEPS), num_workers=2))
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        with Peer.attach(model, optimizer, **options) as peer:
            if mode == "own":
                signal.signal(signal.SIGTERM, lambda *_: peer.request_stop())
                rows = Rows(far, STEPS)
            for step, batch in enumerate(DataLoader(rows, num_workers=2 * (mode == "own"))):
                loss = model(**batch)["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                peer.step(tokens=1, loss=loss)
                if mode == "loop" and step == STEPS:
                    slow[0]
                if peer.should_stop:
                    break


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    train(sys.argv[1], Path(sys.argv[2]))
