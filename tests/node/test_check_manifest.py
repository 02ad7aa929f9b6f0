"""`check_manifest`: values that are seldom meant, and what a swarm needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.bootstrap import manifests
from gossamer.bootstrap.cli.config_check import check_manifest, disk_needed
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.payloads.payload import payload_length
from gossamer.protocol.rules import RULES
from tests.node.findings import INVITED, levels, look
from tests.protocol import builders


def odd(**sections: Any) -> set[str]:
    """Fields that are warned of."""
    said = levels(check_manifest(builders.manifest(**sections)))
    return {field for field, level in said.items() if "warning" in level} - {"task.name"}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"outer": {"codec": "int2"}}, "outer.momentum"),
        ({"outer": {"learning_rate": 3.0}}, "outer.learning_rate"),
        ({"outer": {"codec": "topk", "momentum": 0.0, "learning_rate": 4.0}}, "outer.learning_rate"),
        ({"outer": {"learning_rate": 0.01}}, "outer.learning_rate"),
        ({"outer": {"ef_decay": 0.1}}, "outer.ef_decay"),
        ({"outer": {"clip": 0.0}}, "outer.clip"),
        ({"outer": {"weight_cap": 0.0}}, "outer.weight_cap"),
        ({"pace": {"every_steps": 0, "every_seconds": 0.2}}, "pace.every_seconds"),
        ({"pace": {"min_round_seconds": 90.0}}, "pace.min_round_seconds"),
        ({"swarm": {"name": "n", "created": 2**40}}, "swarm.created"),
        ({"history": {"retain": 0}}, "history.retain"),
        ({"history": {"retain": 30}}, "history.retain"),
        ({"history": {"snapshot_every": 2000, "retain": 9000}}, "history.snapshot_every"),
    ],
)
def test_values_that_are_seldom_meant(sections: dict[str, Any], field: str) -> None:
    assert odd(**sections) == {field}


def test_members_who_were_invited_need_no_bounds() -> None:
    assert odd(outer={"clip": 0.0, "weight_cap": 0.0}, admission=builders.admission()) == set()


def test_how_long_histories_usually_are_goes_with_the_fragments() -> None:
    """As `gossamer init` writes them."""
    manifest = builders.manifest(fragments=2, history={"retain": 30})
    (said,) = [found.text for found in check_manifest(manifest) if found.subject == "history.retain"]
    assert said.endswith("512 is usual")


def test_a_node_cannot_train_what_a_script_trains() -> None:
    manifest = builders.manifest(task={"name": "chess"})
    assert levels(check_manifest(manifest))["task.name"] == ["warning"]
    assert levels(check_manifest(manifest, trains=True))["task.name"] == ["error"]


def test_what_init_writes_is_not_odd(tmp_path: Path) -> None:
    assert odd() == set()
    for codec in CODECS:
        for rule in (None, *RULES):
            manifest, _ = manifests.create(
                name="n",
                task="text",
                options={},
                codec=codec,
                every_steps=30,
                every_seconds=0,
                fragments=2,
                seed=0,
                averaging=rule,
            )
            assert set(levels(check_manifest(manifest))) == {"manifest"}, f"{codec} by {rule}"
    manifests.write(manifest, tmp_path / "m.toml")
    assert set(look(tmp_path / "m.toml")) == {"manifest"}
    text = (tmp_path / "m.toml").read_text().replace('preset = "tiny"', 'preset = "huge"')
    (tmp_path / "m.toml").write_text(text)
    assert [level for level, _ in look(tmp_path / "m.toml")["task.options"]] == ["error"]
    (tmp_path / "m.toml").write_text(text.replace("momentum", "momentun"))
    ((level, said),) = look(tmp_path / "m.toml")["manifest"]
    assert level == "error" and "outer.momentun" in said


def test_the_disk_that_a_model_needs() -> None:
    """As docs/operating.md has it: payloads of all members, five snapshots, the trainer's state twice."""
    numel = INVITED.plan().numel
    few, many = disk_needed(INVITED, 1, False), disk_needed(INVITED, 9, False)
    more = disk_needed(INVITED, 2, False) - few
    assert few > more + 20 * numel and many - few == 8 * more
    assert disk_needed(INVITED, 1, True) - few == 32 * numel


def test_the_smallest_chunk_takes_a_block_of_the_disk() -> None:
    """Of tiny models nearly all of the space is that."""
    history = {"retain": 500, "seal_after": 4, "snapshot_every": 12}
    tiny = builders.manifest(history=history)
    assert payload_length(CODECS[tiny.outer.codec], tiny.plan().fragments[0]) < 4096
    needed = disk_needed(tiny, 3, False)
    assert 3 * 512 * 4096 < needed < 3 * 512 * (4096 + 1100) + 2e6
