"""`gossamer.models.llama_format`: `transformers` loads the built-in GPT, and computes what we compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gossamer.models import TaskError
from gossamer.models.gpt import GPT, PRESETS, GPTConfig
from gossamer.models.llama_format import llama_files
from gossamer.models.registry import build_task
from gossamer.models.task import Task, named_tensors

TEXTS = ["", " two  spaces ", "don't\r\n\tstop", "grüße, 世界 🙂", "\x00\x01\x02<s></s>\x7f\xa0\xad"]


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported where a test wants it: that takes a while, of every process that collects tests."""
    return pytest.importorskip("transformers")


def model_of(config: GPTConfig, seed: int) -> GPT:
    """A model whose every parameter matters, as after training: norms are not 1."""
    model = GPT(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.05 if parameter.ndim > 1 else 0.3)
    return model.eval()


def saved(config: GPTConfig, model: GPT, folder: Path) -> Path:
    for name, data in llama_files(config).items():
        (folder / name).write_bytes(data)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "config",
    [
        PRESETS["tiny"],
        GPTConfig(context=48, layers=3, heads=2, width=64, hidden=96, rope_theta=500.0, norm_eps=1e-2),
    ],
    ids=["tiny", "of another shape, base and epsilon"],
)
def test_logits_are_equal(transformers: Any, config: GPTConfig, seed: int, tmp_path: Path) -> None:
    ours = model_of(config, seed)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved(config, ours, tmp_path)).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == torch.float32
    assert theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    tokens_BL = torch.randint(0, 256, (3, config.context), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected_BLV, found_BLV = ours(tokens_BL), theirs(tokens_BL).logits
    assert expected_BLV.std() > 0.1, "there is something to compare"
    torch.testing.assert_close(found_BLV, expected_BLV, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_its_tokens_are_bytes_and_it_generates(transformers: Any, seed: int, tmp_path: Path) -> None:
    config = PRESETS["tiny"]
    ours = model_of(config, seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved(config, ours, tmp_path))
    for text in TEXTS:
        tokens = tokenizer(text)["input_ids"]
        assert bytes(tokens) == text.encode() and tokenizer.decode(tokens) == text
    assert all(tokenizer.decode([byte]) == chr(byte) for byte in range(128))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = tokenizer("def ", return_tensors="pt")
    written = theirs.generate(**prompt, max_new_tokens=24, do_sample=False)[0].tolist()
    seen = list(b"def ")
    for _ in range(24):  # none of them ends it: bytes 1 and 2 are no marks
        with torch.no_grad():
            seen.append(int(ours(torch.tensor([seen]))[0, -1].argmax()))
    assert written == seen


def test_other_vocabularies_have_no_byte_tokenizer() -> None:
    config = GPTConfig(vocab=300, context=8, layers=1, heads=1, width=4, hidden=4)
    files = llama_files(config)
    assert sorted(files) == ["config.json", "generation_config.json"]
    assert json.loads(files["config.json"])["vocab_size"] == 300


def test_a_task_says_what_it_has() -> None:
    task = build_task("text", {"preset": "small", "context": 64})
    assert json.loads(task.pretrained_files()["config.json"])["max_position_embeddings"] == 64
    with pytest.raises(TaskError, match="Task has no Hugging Face form"):
        Task.pretrained_files(task)
