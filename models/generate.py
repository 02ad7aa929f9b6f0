"""Text from a byte-level language model: the next bytes one at a time, then characters from bytes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from gossamer.models.task import evaluating


def generate_bytes(
    model: nn.Module, prompt: bytes, *, context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield the bytes after `prompt` without end, each drawn from the last of the model's logits (B, L, V).

    The model sees only the last `context` bytes. There is no cache, so each byte costs a forward pass over
    them. Sampling is on the CPU with its own generator; `temperature` 0 takes the likeliest byte.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = bytearray(prompt or b"\n")[-context:]
    while True:
        logits_V = _last_logits(model, seen)
        if temperature == 0:
            byte = int(logits_V.argmax())
        else:
            below_V = logits_V - logits_V.max()  # the largest is 0, so that no temperature makes it infinite
            byte = int(torch.multinomial((below_V / temperature).softmax(0), 1, generator=generator))
        seen = (seen + bytes([byte]))[-context:]
        yield byte


def _last_logits(model: nn.Module, seen: bytearray) -> Tensor:
    device = next(model.parameters()).device
    # Entered for each byte: between two bytes a consumer may pause for as long as it likes, or train.
    with evaluating(model):
        logits_BLV: Tensor = model(torch.tensor([list(seen)], device=device))
    # 64 bits, so that a low temperature does not overflow; on the CPU, as some devices lack float64.
    return logits_BLV[0, -1].cpu().double()


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
