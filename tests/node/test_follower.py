"""A rank other than the first, which does what the first has decided."""

from __future__ import annotations

import pytest
from torch import nn

from gossamer.bootstrap.manifests import describe
from gossamer.node.trainer.beside import Beside
from gossamer.node.trainer.follower import Follower
from gossamer.node.trainer.ranks import Alone, Word
from gossamer.protocol.errors import ConfigError


class Second(Alone):
    """One of two ranks; the first says that a fragment changes."""

    rank, size = 1, 2

    def agree(self, word: Word) -> Word:
        return word._replace(touched=frozenset([0]))


def test_a_parameter_that_only_this_rank_has_replaced_is_an_error_before_the_next_change() -> None:
    model = nn.Linear(4, 2)
    follower = Follower(
        model, describe(model, name="test"), Second({}), node_id=b"", stop_round=0, beside=Beside()
    )
    follower.step(1, 0.0)
    model.weight = nn.Parameter(model.weight.detach().clone())
    with pytest.raises(ConfigError, match="'weight' was moved, resized or replaced"):
        follower.step(1, 0.0)
    with pytest.raises(ConfigError, match="'weight' was moved, resized or replaced"):
        follower.drop_progress()
