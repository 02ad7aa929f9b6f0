"""The model: its sizes, its determinism, and its arithmetic against independent implementations."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from gossamer.models import TaskError
from gossamer.models.gpt import GPT, PRESETS, GPTConfig
from gossamer.models.task import named_tensors

SMALL = GPTConfig(vocab=64, context=16, layers=2, heads=2, width=32, hidden=48)


def tokens_BL(batch: int, length: int, vocab: int = 64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocab, (batch, length)))


def parameters_of(config: GPTConfig) -> int:
    layer = 4 * config.width**2 + 3 * config.width * config.hidden + 2 * config.width
    return config.vocab * config.width + config.layers * layer + config.width


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("tiny", 410_240), ("small", 3_082_496), ("medium", 25_043_456), ("124m", 123_426_688)],
)
def test_preset_sizes(preset: str, parameters: int) -> None:
    assert parameters_of(PRESETS[preset]) == parameters


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_size_formula_holds_for_the_built_model(preset: str) -> None:
    model = GPT(PRESETS[preset])
    assert sum(p.numel() for _, p in named_tensors(model)) == parameters_of(PRESETS[preset])
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


def test_same_seed_same_parameters_and_global_generator_untouched() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = GPT(SMALL, 1), GPT(SMALL, 1), GPT(SMALL, 2)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), (_, b) in zip(named_tensors(first), named_tensors(second), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_initial_parameters_are_pinned() -> None:
    # Genesis parameters must stay the same from version to version, or no manifest's digest matches.
    weights = GPT(SMALL, 7).model.embed_tokens.weight.flatten()[:3].tolist()
    assert weights == pytest.approx([2.4603e-05, 0.0059749, -0.0054828], rel=1e-4)


def test_initial_scales() -> None:
    model = GPT(PRESETS["tiny"], 0)
    for name, parameter in named_tensors(model):
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.02 / math.sqrt(2 * 2) if residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_names_are_llamas() -> None:
    names = [name for name, _ in named_tensors(GPT(SMALL))]
    assert names[:10] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert names[-1] == "model.norm.weight"
    assert set(GPT(SMALL).state_dict()) == set(names)


def test_too_long_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit the context of 16"):
        GPT(SMALL)(tokens_BL(1, 17))


def test_forward_equals_a_plain_numpy_implementation() -> None:
    model, some_BL = GPT(SMALL, 3).double(), tokens_BL(1, 9)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    expected = numpy_forward(SMALL, weights, some_BL[0].numpy())
    np.testing.assert_allclose(model(some_BL)[0].detach().numpy(), expected, atol=1e-6)


def numpy_forward(config: GPTConfig, weights: dict[str, np.ndarray], tokens_L: np.ndarray) -> np.ndarray:
    """The same network, one head and one position at a time."""

    def norm(x_LD: np.ndarray, name: str) -> np.ndarray:
        return x_LD / np.sqrt((x_LD**2).mean(-1, keepdims=True) + config.norm_eps) * weights[name]

    def turn(x_LK: np.ndarray) -> np.ndarray:
        half = x_LK.shape[1] // 2
        angles = np.outer(np.arange(len(x_LK)), config.rope_theta ** (-np.arange(half) / half))
        z = (x_LK[:, :half] + 1j * x_LK[:, half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], -1)

    x_LD = weights["model.embed_tokens.weight"][tokens_L]
    head_width = config.width // config.heads
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        y_LD = norm(x_LD, at + "input_layernorm.weight")
        q, k, v = (y_LD @ weights[f"{at}self_attn.{kind}_proj.weight"].T for kind in "qkv")
        heads = []
        for head in range(config.heads):
            part = slice(head * head_width, (head + 1) * head_width)
            scores = turn(q[:, part]) @ turn(k[:, part]).T / math.sqrt(head_width)
            scores = np.where(np.tri(len(x_LD), dtype=bool), scores, -np.inf)
            attention = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(attention / attention.sum(-1, keepdims=True) @ v[:, part])
        x_LD = x_LD + np.concatenate(heads, -1) @ weights[at + "self_attn.o_proj.weight"].T
        y_LD = norm(x_LD, at + "post_attention_layernorm.weight")
        gate = y_LD @ weights[at + "mlp.gate_proj.weight"].T
        up = y_LD @ weights[at + "mlp.up_proj.weight"].T
        x_LD = x_LD + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x_LD, "model.norm.weight") @ weights["model.embed_tokens.weight"].T


def test_every_parameter_gets_a_gradient() -> None:
    model = GPT(SMALL)
    model(tokens_BL(2, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_deep_copy_stays_tied_and_gives_the_same_logits() -> None:
    model = GPT(SMALL)
    clone = copy.deepcopy(model)
    assert torch.equal(model(tokens_BL(1, 8)), clone(tokens_BL(1, 8)))
    assert len(named_tensors(clone)) == len(named_tensors(model))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", 0, "layers is 0: it must be positive"),
        ("context", -1, "context is -1: it must be positive"),
        ("norm_eps", float("nan"), "norm_eps is nan: it must be positive"),
        ("width", 30, r"width is 30: it must be a multiple of 2 \* heads = 4"),
    ],
)
def test_impossible_shapes_are_refused_by_name(field: str, value: float, message: str) -> None:
    shape = {"context": 16, "layers": 2, "heads": 2, "width": 32, "hidden": 48, field: value}
    with pytest.raises(TaskError, match=f"^{message}$"):
        GPTConfig(**shape)
