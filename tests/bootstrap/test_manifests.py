"""`gossamer.bootstrap.manifests`: what is written can be read, edited by hand, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.inputs import read_manifest
from gossamer.node.trainer import genesis
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history.claims import genesis_claim
from gossamer.protocol.manifest import Manifest
from tests.models.own_tasks import write_task
from tests.protocol.builders import identity


def create(**changes: object) -> tuple[Manifest, Ints]:
    settings: dict[str, object] = {
        "name": "n",
        "task": "text",
        "options": {"preset": "tiny", "lr": 1e-7},
        "codec": "int4",
        "every_steps": None,
        "every_seconds": 0.0,
        "fragments": 1,
        "seed": 0,
        **changes,
    }
    return manifests.create(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fragments", [1, 3])
def test_round_trip(tmp_path: Path, codec: str, fragments: int) -> None:
    written, _ = create(codec=codec, fragments=fragments, every_seconds=2.5 if fragments == 3 else 0.0)
    manifests.write(written, tmp_path / "m.toml")
    assert read_manifest(tmp_path / "m.toml") == written


@pytest.mark.parametrize(
    ("asked", "every", "expected"), [(None, 30, 4), (None, None, 1), (1, 30, 1), (8, 30, 8)]
)
def test_a_partition_may_last_as_many_windows_whatever_the_fragments(
    asked: int | None, every: int | None, expected: int
) -> None:
    """A swarm that sets its own pace cuts a small model less, so that windows can be short."""
    manifest, _ = create(fragments=asked, every_steps=every)
    assert manifest.layout.fragments == expected
    assert manifest.history.retain == 256 * expected


def test_a_model_of_few_tensors_has_no_more_fragments_than_those(task_folder: Path) -> None:
    two_layers = "nn.Linear(8, self.options.width), nn.Linear(self.options.width, 1)"
    task = write_task(task_folder, two_layers, "nn.Linear(8, 1)")
    manifest, _ = create(task=task, options={}, fragments=None, every_steps=30, trial=False)
    assert manifest.layout.fragments == len(manifest.layout.tensors) == 2


@pytest.mark.parametrize("invited", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_owners_survive(tmp_path: Path, invited: bool, count: int) -> None:
    keys = tuple(identity(n).public_key.hex() for n in range(count))
    written, _ = create(owners=keys, invited=invited)
    manifests.write(written, tmp_path / "m.toml")
    read = read_manifest(tmp_path / "m.toml")
    assert read == written and read.swarm_id == written.swarm_id
    assert read.admission.owners == keys
    assert read.admission.mode == ("invited" if invited else "open")
    assert (read.outer.weight_cap == 0) == invited


@pytest.mark.parametrize(
    ("owners", "said"),
    [
        ((), "at least one owner"),
        (("ab" * 32,) * 2, "listed twice"),
        (("xy" * 32,), "owners"),
        (("00" * 32,), "usable"),
    ],
)
def test_owners_that_cannot_be(owners: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create(owners=owners, invited=True)


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new = [1] # line", "ünï ☃ 漢字", "'", "a" * 200])
def test_any_name_survives(tmp_path: Path, name: str) -> None:
    written, _ = create(name=name)
    manifests.write(written, tmp_path / "m.toml")
    assert read_manifest(tmp_path / "m.toml").swarm.name == name


def test_comments_and_layout_do_not_matter_and_values_do(tmp_path: Path) -> None:
    written, _ = create(every_steps=30)
    path = tmp_path / "m.toml"
    manifests.write(written, path)
    text = path.read_text()
    lines = [line.split("  #")[0] for line in text.splitlines() if not line.startswith("#")]
    path.write_text("\n\n".join(lines))
    assert read_manifest(path).swarm_id == written.swarm_id
    path.write_text(text.replace("learning_rate = 0.7", "learning_rate = 0.25"))
    edited = read_manifest(path)
    assert edited.outer.codecs[0].learning_rate == 0.25 and edited.swarm_id != written.swarm_id


def test_the_outer_settings_suit_the_codec() -> None:
    assert create(codec="int4", averaging="rda", every_steps=30)[0].outer.momentum == 0.7
    for codec in ("int2", "topk"):
        outer = create(codec=codec)[0].outer
        assert outer.momentum == 0.0 and outer.codecs[0].ef_decay < 1.0, "below 4 bits momentum hurts"
    assert learning_rate(codec="topk") > learning_rate(codec="topk8") > learning_rate(codec="int2")


def learning_rate(**changes: object) -> float:
    return create(**changes)[0].outer.codecs[0].learning_rate


def test_short_windows_need_no_momentum() -> None:
    for rule in ("rda", "mean"):
        outer = create(averaging=rule, every_steps=5)[0].outer
        assert (outer.codecs[0].learning_rate, outer.momentum) == (1.0, 0.0)
    assert create(codec="topk", every_steps=5)[0].outer == create(codec="topk")[0].outer


def test_where_nobody_chooses_a_codec_nodes_have_a_ladder(tmp_path: Path) -> None:
    written, _ = create(codec=None)
    assert list(written.outer.rungs) == ["int4", "topk8", "topk16", "topk"]
    rates = [rung.learning_rate for rung in written.outer.codecs]
    assert rates == sorted(rates) and written.outer.momentum == 0.5, "for windows of 30"
    assert create(codec=None, every_steps=30)[0].outer.momentum == 0.0
    manifests.write(written, tmp_path / "m.toml")
    assert read_manifest(tmp_path / "m.toml") == written


def test_what_is_averaged_by_mean_takes_longer_steps_and_less_momentum() -> None:
    by_rda, by_mean = (create(averaging=rule, every_steps=30)[0].outer for rule in ("rda", "mean"))
    assert by_mean.momentum < by_rda.momentum
    falling = create(options={"preset": "tiny", "horizon_tokens": 10_000}, every_steps=30)[0].outer
    assert falling == by_rda, "Muon's steps get shorter by themselves"
    for codec in ("int4", "int2", "topk"):
        by_rda_lr, by_mean_lr = (
            learning_rate(codec=codec, averaging=rule, every_steps=30) for rule in ("rda", "mean")
        )
        assert by_mean_lr > by_rda_lr


def rules(manifest: Manifest) -> dict[str, str]:
    return {spec.name: spec.averaging for spec in manifest.layout.tensors}


def test_the_rule_is_the_tasks_unless_one_is_chosen_for_matrices() -> None:
    adamw = {"preset": "tiny", "optimizer": "adamw"}
    by_task = rules(create(options=adamw)[0])
    assert set(by_task.values()) == {"rda", "mean"} and by_task["model.embed_tokens.weight"] == "mean"
    assert set(rules(create()[0]).values()) == {"mean"}, "the default optimizer is Muon"
    assert rules(create(averaging="rda")[0]) == by_task == rules(create(averaging="rda", options=adamw)[0])
    assert set(rules(create(averaging="mean", options=adamw)[0]).values()) == {"mean"}


def test_the_first_model_follows_from_the_seed(tmp_path: Path) -> None:
    first, phi = create()
    again, _ = create()
    other, _ = create(seed=1)
    assert first.genesis == again.genesis != other.genesis
    assert snapshots.digest(phi) == first.genesis.root
    chunks = ChunkStore(tmp_path / "chunks")
    snapshots.store(genesis.rebuilt(first), chunks)
    assert genesis.is_stored(first, chunks)
    assert (snapshots.load(genesis_claim(first.genesis.root), first.plan().numel, chunks) == phi).all()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"options": {"preset": "small"}}, r"does not fit its layout: tensor '.*' has shape"),
        (
            {"seed": 1},
            "different initial parameters than the manifest states. If its seed, fragments or task",
        ),
    ],
)
def test_a_manifest_whose_model_was_edited_is_said(change: dict[str, dict[str, object]], part: str) -> None:
    manifest, _ = create()
    task = manifest.task.model_copy(update=change)
    with pytest.raises(ConfigError, match=part):
        genesis.rebuilt(manifest.model_copy(update={"task": task}))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"task": "chess"}, "chess"),
        ({"options": {"preset": "huge"}}, "huge"),
        ({"options": {"presett": "tiny"}}, "did you mean 'preset'"),
        ({"codec": "zip"}, "zip"),
        ({"averaging": "median"}, "choose one of centered-clip, mean, rda"),
        ({"fragments": 0}, "fragments must be 1 to"),
        ({"fragments": 1000}, "fragments must be 1 to"),
        ({"name": ""}, "swarm.name"),
        ({"name": "a\nb"}, "swarm.name"),
    ],
)
def test_mistakes_are_one_line(change: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        create(**change)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    manifest, _ = create()
    for path in (tmp_path / "missing" / "m.toml", tmp_path):
        with pytest.raises(StorageError, match="cannot write"):
            manifests.write(manifest, path)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_is_written_once(tmp_path: Path) -> None:
    """Run again, a script that describes its model would make another swarm of it."""
    (one, _), (other, _) = create(), create(seed=7)
    path = tmp_path / "m.toml"
    for _ in range(2):
        manifests.write(one, path)
    with pytest.raises(ConfigError, match="is the manifest of another swarm"):
        manifests.write(other, path)
    assert read_manifest(path) == one
    manifests.write(other, path, replace=True)
    assert read_manifest(path) == other


def test_a_manifest_that_somebody_slipped_in_editing_is_not_lost(tmp_path: Path) -> None:
    manifest, _ = create()
    path = tmp_path / "m.toml"
    manifests.write(manifest, path)
    edited = path.read_text().replace("[layout]", "[layout")
    path.write_text(edited)
    with pytest.raises(ConfigError, match="m.toml is not valid TOML"):
        manifests.write(manifest, path)
    assert path.read_text() == edited


# -- a model of one's own


class Odd(nn.Module):
    """Tied, frozen, a buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))


def test_describing_a_model_lists_what_it_trains(tmp_path: Path) -> None:
    model = Odd()
    manifest = manifests.describe(model, name="odd", codec="topk", every_seconds=2.0, options={"width": 3})
    found = {spec.name: (spec.shape, spec.averaging) for spec in manifest.layout.tensors}
    assert found == {
        "scale": ((), "mean"),
        "embed.weight": ((5, 3), "mean"),
        "norm.weight": ((3,), "mean"),
        "norm.bias": ((3,), "mean"),
        "inner.weight": ((3, 3), "rda"),
        "inner.bias": ((3,), "mean"),
    }
    assert manifest.task.name == manifests.CUSTOM
    assert (manifest.outer.momentum, manifest.pace.every_steps) == (0.0, 0)
    assert manifest.genesis.root == snapshots.digest(genesis.parameters(model, manifest.plan()))
    manifests.write(manifest, tmp_path / "m.toml")
    assert read_manifest(tmp_path / "m.toml") == manifest


def test_a_window_has_one_length() -> None:
    model = nn.Linear(2, 2)
    assert manifests.describe(model, name="m").pace.is_set_by_swarm
    assert manifests.describe(model, name="m", every_steps=20).pace.every_steps == 20
    assert manifests.describe(model, name="m", every_steps=0, every_seconds=2).pace.every_seconds == 2.0
    with pytest.raises(ConfigError, match="every_steps and every_seconds both set .* give one of them"):
        manifests.describe(model, name="m", every_steps=10, every_seconds=2)
    for no_time in (None, "8", True):
        with pytest.raises(ConfigError, match="every_seconds"):
            manifests.describe(model, name="m", every_seconds=no_time)  # type: ignore[arg-type]


def test_options_of_any_name_survive(tmp_path: Path) -> None:
    options = {"a b": 1, "größe": 0.5, "": "x", 'a"b\n': True, "a.b": 2, "plain-1": 3}
    manifest = manifests.describe(nn.Linear(2, 2), name="odd", options=options)
    manifests.write(manifest, tmp_path / "m.toml")
    assert read_manifest(tmp_path / "m.toml") == manifest
    assert "\nplain-1 = 3\n" in (tmp_path / "m.toml").read_text()


def test_a_compiled_or_wrapped_model_is_described_like_the_plain_one() -> None:
    model = nn.Linear(3, 2)
    plain = manifests.describe(model, name="x")
    for other in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert manifests.describe(other, name="x").layout == plain.layout  # type: ignore[arg-type]


def test_averaging_can_be_chosen_by_tensor() -> None:
    manifest = manifests.describe(nn.Linear(3, 2), name="x", averaging={"weight": "mean"})
    assert [spec.averaging for spec in manifest.layout.tensors] == ["mean", "mean"]
    of_all = manifests.describe(nn.Linear(3, 2), name="x", averaging="mean")
    assert rules(of_all) == {"weight": "mean", "bias": "mean"}
    assert of_all.outer == manifest.outer != manifests.describe(nn.Linear(3, 2), name="x").outer
    with pytest.raises(ConfigError, match="'wieght', which the model does not train"):
        manifests.describe(nn.Linear(3, 2), name="x", averaging={"wieght": "mean"})
    with pytest.raises(ConfigError, match="averaging 'median' is unknown"):
        manifests.describe(nn.Linear(3, 2), name="x", averaging={"weight": "median"})
    with pytest.raises(ConfigError, match="averaging 'median' is unknown"):
        manifests.describe(nn.Linear(3, 2), name="x", averaging="median")


def test_models_that_cannot_be_described() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        manifests.describe(nn.Linear(3, 2).requires_grad_(False), name="x")
    far = nn.Linear(3, 2)
    nn.init.constant_(far.bias, 100.0)
    with pytest.raises(ConfigError, match="tensor .bias.: .*64"):
        manifests.describe(far, name="x")
