"""In what the built-in model computes: its parameters, and what nodes share of them, are float32 anywhere."""

from contextlib import AbstractContextManager, nullcontext

import torch


def mixed(device: torch.device) -> AbstractContextManager[object]:
    """For the forward pass: products in bfloat16 where the hardware has that, many times as fast.

    On CPUs, of which few have, everything stays float32.
    """
    return torch.autocast(device.type, torch.bfloat16) if _is_quick(device) else nullcontext()


def _is_quick(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # which it asks about
        return torch.cuda.is_bf16_supported(including_emulation=False)
