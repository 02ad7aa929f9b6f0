"""`pretrained`: models of `transformers` come back from an export as they were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.bootstrap import manifests
from gossamer.models.registry import build_task
from gossamer.node.daemon.phi.restore import replay
from gossamer.node.exports.export import export
from gossamer.node.exports.generate import load_into
from gossamer.node.trainer import genesis
from tests.node.folders import Folder, text_model

SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported where a test wants it: that takes a while, of every process that collects tests."""
    return pytest.importorskip("transformers")


def configuration(transformers: Any, kind: str) -> object:
    """A small model's; dropout off, so that there is one answer."""
    match kind:
        case "gpt2":  # tied, with biases and learned positions
            return transformers.GPT2Config(
                vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
            )
        case "llama":
            return transformers.LlamaConfig(**SHAPE, intermediate_size=48, tie_word_embeddings=False)
        case _:  # experts, whose tensors lie on disk otherwise than in memory
            return transformers.MixtralConfig(
                **SHAPE, intermediate_size=48, num_key_value_heads=1, num_local_experts=4, head_dim=16
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_and_logits_are_equal(
    transformers: Any, kind: str, dtype: str, seed: int, tmp_path: Path
) -> None:
    config = configuration(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    manifest = manifests.describe(model, name="n")
    phi = genesis.parameters(model, manifest.plan())
    folder = Folder(tmp_path / "node", manifest, phi)
    config.save_pretrained(folder.home.pretrained_path)  # type: ignore[attr-defined]
    export(folder.home, tmp_path / "out", dtype=dtype)
    found, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(said.values()), said
    assert found.dtype == getattr(torch, dtype)
    load_into(model, manifest, phi)  # as the swarm rounds it
    for name, tensor in found.named_parameters():
        assert torch.equal(tensor, model.get_parameter(name).to(found.dtype)), name
    if dtype == "float32":
        tokens_BL = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert torch.equal(found.eval()(tokens_BL).logits, model(tokens_BL).logits)


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 3])
def test_the_built_in_model(transformers: Any, fragments: int, seed: int, tmp_path: Path) -> None:
    """From the folder of a node to `transformers`, nothing between."""
    manifest, phi = text_model(context=32, fragments=fragments, seed=seed % 1000)
    folder = Folder(tmp_path / "node", manifest, phi)
    export(folder.home, tmp_path / "out")
    ours = build_task("text", manifest.task.options).build_model(99).eval()
    load_into(ours, manifest, replay(folder.home)[1].phi)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens_BL = torch.tensor([list("grüße aus der Spinnerei".encode())])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens_BL).logits, ours(tokens_BL), rtol=1e-5, atol=1e-5)
