"""A small GPT in Llama's architecture, the model that swarms train by default; and text from it.

The whole network is in this file: pre-norm RMSNorm, rotary positions, causal attention, SwiGLU, no biases,
the head tied to the embedding. Modules have the names and conventions of Hugging Face's
`LlamaForCausalLM` (rotate-half rotary included), so the state dict loads there unchanged.

The initial parameters are drawn with NumPy, not torch: torch's normal sampler takes different code paths on
different CPUs and differs in the last bits, while nodes must rebuild the genesis parameters exactly.

Shape suffixes: B batch, L positions, D width, H heads, K head width, F hidden width, V vocabulary.
Sources: Touvron et al. 2023 (arXiv 2302.13971); Su et al. 2021 (2104.09864); Shazeer 2020 (2002.05202);
the scaled residual init is GPT-2's.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.models import TaskError
from gossamer.models.task import evaluating


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT; refuses impossible shapes with a `TaskError` that names the field."""

    vocab: int = 256
    """Number of tokens; 256 for bytes."""
    context: int
    """The longest input, in tokens."""
    layers: int
    heads: int
    width: int
    """Width of the residual stream; `width / heads` must be even, for the rotary pairs."""
    hidden: int
    """Inner width of the SwiGLU, about 8/3 of `width`."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in ("vocab", "context", "layers", "heads", "width", "hidden", "rope_theta", "norm_eps"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise TaskError(f"{field} is {value}: it must be positive")
        if self.width % (2 * self.heads):
            raise TaskError(f"width is {self.width}: it must be a multiple of 2 * heads = {2 * self.heads}")


PRESETS: dict[str, GPTConfig] = {
    "tiny": GPTConfig(context=128, layers=2, heads=4, width=128, hidden=320),
    "small": GPTConfig(context=256, layers=4, heads=4, width=256, hidden=640),
    "medium": GPTConfig(context=512, layers=8, heads=8, width=512, hidden=1344),
    "124m": GPTConfig(context=1024, layers=12, heads=14, width=896, hidden=2624),
}
"""0.41, 3.1, 25 and 123 million parameters."""


def _linear(inputs: int, outputs: int) -> nn.Linear:
    # skip_init: torch's own initialisation would cost time and move the global generator.
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
    return linear


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = _linear(config.width, config.width)
        self.k_proj = _linear(config.width, config.width)
        self.v_proj = _linear(config.width, config.width)
        self.o_proj = _linear(config.width, config.width)

    def forward(self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D); position i sees positions 0..i."""
        B, L, D = x_BLD.shape
        heads = (B, L, self.heads, D // self.heads)
        q_BHLK = rotate(self.q_proj(x_BLD).view(heads).transpose(1, 2), cos_LK, sin_LK)
        k_BHLK = rotate(self.k_proj(x_BLD).view(heads).transpose(1, 2), cos_LK, sin_LK)
        v_BHLK = self.v_proj(x_BLD).view(heads).transpose(1, 2)
        y_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        y_BLD: Tensor = self.o_proj(y_BHLK.transpose(1, 2).reshape(B, L, D))
        return y_BLD


class SwiGLU(nn.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.width, config.hidden)
        self.up_proj = _linear(config.width, config.hidden)
        self.down_proj = _linear(config.hidden, config.width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        y_BLD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return y_BLD


class Block(nn.Module):
    """One layer: attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), cos_LK, sin_LK)
        y_BLD: Tensor = x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))
        return y_BLD


class Decoder(nn.Module):
    """Embedding, layers and the last norm; a separate module only because Llama has it as `model`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding = nn.utils.skip_init(nn.Embedding, config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        cos_LK, sin_LK = rotary_table(config.context, config.width // config.heads, config.rope_theta)
        # Not persistent: they follow from the configuration, and nodes do not share them.
        self.register_buffer("cos_LK", cos_LK, persistent=False)
        self.register_buffer("sin_LK", sin_LK, persistent=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """(B, L) int64 to (B, L, D)."""
        L = tokens_BL.shape[1]
        cos_LK, sin_LK = self.get_buffer("cos_LK")[:L], self.get_buffer("sin_LK")[:L]
        x_BLD: Tensor = self.embed_tokens(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos_LK, sin_LK)
        y_BLD: Tensor = self.norm(x_BLD)
        return y_BLD


class GPT(nn.Module):
    """The language model: tokens in, logits of the next token out.

    The same `config` and `seed` give the same parameters on any machine; torch's global generator is
    not touched.
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self._initialise(seed)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Logits (B, L, V) for tokens (B, L) int64, L <= context; those at i depend on tokens 0..i only.

        Raises:
            ValueError: more tokens than the context.
        """
        if tokens_BL.shape[1] > self.config.context:
            raise ValueError(f"{tokens_BL.shape[1]} tokens do not fit the context of {self.config.context}")
        return F.linear(self.model(tokens_BL), self.model.embed_tokens.weight)

    def _initialise(self, seed: int) -> None:
        """Normal(0, 0.02), projections into the residual stream smaller by 1/sqrt(2 * layers), norms 1."""
        random = np.random.default_rng(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim < 2:
                    parameter.fill_(1.0)
                    continue
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * self.config.layers) if into_residual else 0.02
                values = std * random.standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values))


def rotary_table(length: int, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, (L, K) float32, of position times frequency; the K/2 frequencies are repeated twice."""
    frequencies = theta ** -(np.arange(0, head_width, 2) / head_width)
    angles = np.outer(np.arange(length), np.concatenate([frequencies, frequencies]))
    return torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float()


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) of the last axis by its position's angle; keeps shape and dtype."""
    first, second = x_BHLK.chunk(2, dim=-1)
    turned_BHLK = torch.cat((-second, first), dim=-1)
    return (x_BHLK * cos_LK + turned_BHLK * sin_LK).type_as(x_BHLK)


def mixed(device: torch.device) -> AbstractContextManager[object]:
    """A context for the forward pass: products in bfloat16 where the hardware has it, many times as fast.

    On CPUs, few of which have it, everything stays float32.
    """
    return torch.autocast(device.type, torch.bfloat16) if _is_quick(device) else nullcontext()


def _is_quick(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # the next call asks about the current device
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def generate_bytes(
    model: nn.Module, prompt: bytes, *, context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield the bytes after `prompt` without end, each drawn from the last of the model's logits (B, L, V).

    The model sees only the last `context` bytes. There is no cache, so each byte costs a forward pass over
    them. Sampling is on the CPU with its own generator; `temperature` 0 takes the likeliest byte.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    seen = bytearray(prompt or b"\n")[-context:]
    while True:
        # Entered for each byte: between two bytes a consumer may pause for as long as it likes, or train.
        with evaluating(model):
            logits_BLV: Tensor = model(torch.tensor([list(seen)], device=device))
        # 64 bits, so that a low temperature does not overflow; on the CPU, as some devices lack float64.
        logits_V = logits_BLV[0, -1].cpu().double()
        if temperature == 0:
            byte = int(logits_V.argmax())
        else:
            below_V = logits_V - logits_V.max()  # the largest is 0, so that no temperature makes it infinite
            byte = int(torch.multinomial((below_V / temperature).softmax(0), 1, generator=generator))
        seen = (seen + bytes([byte]))[-context:]
        yield byte


def decode_characters(data: Iterable[int], length: int) -> Iterator[str]:
    """Yield exactly `length` characters of UTF-8, as soon as they are whole; broken bytes become U+FFFD.

    Takes at most 4 bytes for each character; `data` must not end before that.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    missing = length
    source = iter(data)
    while missing > 0:
        text = decoder.decode(bytes([next(source)]))[:missing]
        missing -= len(text)
        if text:
            yield text
