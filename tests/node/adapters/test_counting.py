"""`gossamer.node.adapters.base`: what counts as a token, and sums over micro-batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.node.adapters.base import Membership, tokens_in
from tests.node.adapters.fake_peer import FakePeer, Fakes

IDS = torch.arange(12).view(3, 4)
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
IMAGES = torch.zeros(5, 1, 8, 8)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS}, 12),
        ({"input_ids": IDS, "attention_mask": MASK}, 7),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4)}, 12),
        ({"labels": torch.zeros(6), "input_ids": IDS}, 12),
        ({"pixel_values": IMAGES, "labels": torch.zeros(5)}, 5),
        (IDS, 12),
        ((IMAGES, torch.zeros(5)), 5),
        ([torch.zeros(9, 2), torch.zeros(9)], 9),
        ({"meta": ["a", "b"], "pair": (IDS, IDS)}, 12),
        ((torch.tensor(3.0), IDS), 1),
        ("no tensor at all", 1),
        ([], 1),
    ],
)
def test_tokens_of_text_and_samples_of_the_rest(batch: Any, tokens: int) -> None:
    assert int(tokens_in(batch)) == tokens


def test_micro_batches_add_up_without_their_graphs() -> None:
    member = Membership(tokens=lambda batch: batch)
    loss = torch.tensor(2.0, requires_grad=True, dtype=torch.bfloat16)
    member._count(3, loss * 1.5)
    member._count(torch.tensor(4), 1.0)
    batches, tokens, total = member._since
    assert (batches, int(tokens), float(total)) == (2, 7, 4.0)
    assert isinstance(total, torch.Tensor) and not total.requires_grad
    assert total.dtype == torch.float32


@pytest.mark.parametrize("returned", [None, "12", MASK.sum(1)])
def test_a_count_that_is_not_one_number_is_named(returned: Any) -> None:
    with pytest.raises(TypeError, match="tokens returned .*: it must return one number for a batch"):
        Membership(tokens=lambda batch: returned)._count(IDS, 1.0)


def test_what_was_counted_before_an_error_is_no_part_of_the_next_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes, member, model = Fakes(monkeypatch), Membership(), torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters())]
    member._attach(model, optimizers)
    member._count(IDS, 1.0)
    member._attach(model, optimizers)
    member._count(IMAGES, 2.0)
    member._step(2.0)
    assert [peer.steps for peer in fakes.made] == [[], [(5, 2.0)]]
    assert [peer.ends for peer in fakes.made] == [["abandon"], []], "the first goes on no more"


@pytest.mark.parametrize("why", ["the last round", "asked to"])
def test_the_trainer_is_to_end_with_its_node(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    fakes, member = Fakes(monkeypatch), Membership()
    member._attach(torch.nn.Linear(1, 1), [torch.optim.SGD([torch.zeros(1)], lr=1.0)])
    assert not member._step(2.0)
    (peer,) = fakes.made
    if why == "asked to":
        peer._stop_after = 2
    else:
        peer.finished = True
    assert member._step(2.0)


def test_a_node_whose_leaving_was_interrupted_ends_with_the_next_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes, model = Fakes(monkeypatch), torch.nn.Linear(1, 1)
    member = Membership()
    member._attach(model, [])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FakePeer, "finish", _interrupted)
        member._leave()
    member._attach(model, [])
    assert [peer.ends for peer in fakes.made] == [["abandon"], []]


def _interrupted(_: object) -> bool:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(("package", "extra"), [("transformers", "hf"), ("lightning", "lightning")])
def test_without_the_framework_one_line_says_what_to_install(
    tmp_path: Path, package: str, extra: str
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('it is not here')")
    done = subprocess.run(
        [sys.executable, "-c", f"import gossamer.node.adapters.{package}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == (
        "gossamer.protocol.errors.ConfigError: it is not here: the adapter needs it;"
        f" run: pip install 'gossamer[{extra}]'"
    )
