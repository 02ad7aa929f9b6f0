"""The precision in which the built-in model computes. Its parameters, which nodes share, are always
float32."""

from contextlib import AbstractContextManager, nullcontext

import torch


def mixed(device: torch.device) -> AbstractContextManager[object]:
    """A context for the forward pass: products in bfloat16 where the hardware has it, many times as fast.

    On CPUs, few of which have it, everything stays float32.
    """
    return torch.autocast(device.type, torch.bfloat16) if _is_quick(device) else nullcontext()


def _is_quick(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # the next call asks about the current device
        return torch.cuda.is_bf16_supported(including_emulation=False)
