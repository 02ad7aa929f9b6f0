"""`gossamer.bootstrap.summary`: the numbers of a run, and when all is well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.bootstrap.summary import check_result_path, write_result
from gossamer.protocol.errors import ConfigError, StorageError
from tests.bootstrap.summaries import status, summary


def test_what_data_parallel_training_would_have_sent() -> None:
    """2 (n - 1) / n of the fp32 gradients, per worker and step: here 100 steps each of 1000 parameters."""
    sent = [summary(*map(status, range(nodes))).data_parallel_bytes for nodes in (4, 2, 1)]
    assert sent == [400 * 1000 * 4 * 2 * 3 // 4, 200 * 1000 * 4, 0]


def test_all_is_well() -> None:
    found = summary(status(0), status(1))
    assert found.ok and found.identical
    assert (found.val_loss_start, found.val_loss_end) == (5.0, 2.1), "the best start and the worst end"
    assert found.val_loss_average == 1.6
    assert found.tokens == 2000
    text = json.loads(json.dumps(found.to_json()))
    assert text["ok"] is True and [node["node_id"] for node in text["nodes"]] == ["0", "1"]


@pytest.mark.parametrize(
    ("change", "identical", "reason"),
    [
        ({"phi_digest": "q"}, False, "the replicas are not identical"),
        ({"merged_digest": "n"}, False, "the replicas are not identical"),
        ({"round": 9}, True, "node-1 published 9 of 10 rounds"),
        ({"trainer": {"val_loss": 6.0}}, True, "the validation loss did not fall"),
        ({"trainer": {"val_loss": 5.0}}, True, "the validation loss did not fall"),
        ({"trainer": {"val_loss_average": 5.0}}, True, "the validation loss did not fall"),
    ],
)
def test_anything_amiss_is_not_well(change: dict[str, Any], identical: bool, reason: str) -> None:
    found = summary(status(0), status(1, **change))
    assert not found.ok
    assert found.identical is identical
    assert found.reasons == [reason] == found.to_json()["reasons"]


def test_missing_fields() -> None:
    bare = {k: v for k, v in status(0).items() if k not in ("trainer", "phi_digest", "merged_digest")}
    found = summary(bare, bare)
    assert not found.ok and not found.identical
    assert found.val_loss_start is found.val_loss_average is found.val_loss_end is None
    assert found.nodes[0]["digest"] == "" and found.nodes[0]["inner_steps"] == 0
    assert summary(status(0, trainer={"val_loss_average": None})).ok, "it has just joined"
    missing = summary(status(0, trainer={"val_loss_start": None}))
    assert missing.reasons == ["the validation loss was not measured"]


# -- the file


def test_a_result_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path, result = tmp_path / "r.json", summary(status(0))
    path.write_text("old, and longer than" * 1000)
    check_result_path(path)
    write_result(path, result)
    assert json.loads(path.read_text("utf-8"))["nodes"][0]["name"] == "node-0"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="cannot write"):
        write_result(tmp_path / "missing" / "r.json", result)


def test_where_no_result_can_be_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        check_result_path(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_result_path(tmp_path / "missing" / "r.json")
