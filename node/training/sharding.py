"""Parameters that FSDP2 or tensor parallelism has sharded over the ranks: DTensors."""

import sys

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, as FSDP2 and tensor parallelism create."""
    known = sys.modules.get("torch.distributed.tensor")  # slow to import; a script with a DTensor has done it
    return known is not None and isinstance(tensor, known.DTensor)


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters, which are those trained, back into a model that FSDP2 shards.

    A forward pass without a backward pass, as in an evaluation, leaves whole copies of some in their place,
    and the next pass would compute with these.
    """
    known = sys.modules.get("torch.distributed.fsdp")  # as for `is_sharded`
    if known is None:
        return
    for module in model.modules():
        if isinstance(module, known.FSDPModule):
            module.reshard()


def deal_out(whole: Tensor | None, sharded: Tensor) -> None:
    """Set a DTensor to the full tensor of the first rank; `whole` is None on the others."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(sharded, DTensor)
    local = sharded.to_local()
    source = torch.empty(sharded.shape, dtype=local.dtype, device=local.device)
    if whole is not None:
        source.copy_(whole)
    dealt = distribute_tensor(source, sharded.device_mesh, sharded.placements)
    assert isinstance(dealt, DTensor)
    local.copy_(dealt.to_local())
