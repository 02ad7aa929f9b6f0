"""`precision`: bfloat16 products on GPUs that have them, float32 everywhere else."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gossamer.models import gpt as precision
from gossamer.models.gpt import mixed
from gossamer.models.task import DataStream
from gossamer.models.text import ByteTextTask, TextOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.mark.parametrize("supported", [True, False])
def test_where_bfloat16_is_used(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(asked.append(device)))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert precision._is_quick(CUDA) == supported and asked == [CUDA]
    assert not precision._is_quick(CPU)
    assert not precision._is_quick(torch.device("mps"))


def test_on_the_cpu_nothing_changes() -> None:
    matrix = torch.randn(8, 8)
    with mixed(CPU):
        assert (matrix @ matrix).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), mixed(CPU):
        assert (matrix @ matrix).dtype == torch.bfloat16, "a script's own is left alone"


def test_the_built_in_model_learns_in_it_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    found = {}
    for is_quick in (False, True):
        monkeypatch.setattr(precision, "_is_quick", lambda device, is_quick=is_quick: is_quick)
        task = ByteTextTask(TextOptions(batch_size=4, context=32, optimizer="adamw"), [tmp_path])
        model = task.build_model(0)
        optimizers = task.build_optimizer(model)
        batches = task.batches(DataStream(seed=0, node_id=b"node"))
        for _ in range(12):
            loss = task.loss(model, next(batches))
            loss.backward()
            assert loss.dtype == torch.float32
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[is_quick] = task.evaluate(model)
    assert found[True] != found[False], "it was in bfloat16"
    assert found[True] == pytest.approx(found[False], rel=0.05) and found[True] < 5.0
