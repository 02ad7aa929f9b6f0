"""A peer on a link that a test has made, as `Peer.attach` makes one if there are no other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from gossamer.models.task import named_tensors
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.node.trainer.outer import Leader
from gossamer.node.trainer.peer import Peer
from gossamer.node.trainer.ranks import RankContext, Team
from gossamer.protocol.manifest import Manifest


def leading(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    manifest: Manifest,
    link: DaemonLink,
    checkpoint: Path,
    stop_round: int = 0,
    extra_stop_s: float = 0.0,
) -> Peer:
    team = Team(dict(named_tensors(model, frozen=True)))
    context = RankContext(team, stop_round, extra_stop_s=extra_stop_s)
    return Peer(model, Leader(model, optimizers, manifest, link, context, checkpoint), optimizers)
