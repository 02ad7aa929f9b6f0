"""What a node keeps of its own training across restarts."""

import pytest
import torch
from safetensors.torch import load_file

from gossamer.node.trainer.checkpoint import CheckpointWriter, Progress, restore
from tests.node.checkpoints import make, saved_in, trained

pytestmark = pytest.mark.usefixtures("on_each_device")


@pytest.fixture
def saved(tmp_path):
    return saved_in(tmp_path)


def test_any_dtype_and_layout_is_read_back_by_the_library(tmp_path):
    """Numbers of all widths, in whatever order they lie in memory."""
    model, outer, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "turned": torch.arange(12.0).view(3, 4).T,
        "wide": torch.arange(3, dtype=torch.float64),
        "none": torch.empty(0, 2),
        "one": torch.tensor(7),
    }
    optimizer.state[next(model.parameters())] = dict(kept)
    path = tmp_path / "t"
    CheckpointWriter(path).save(outer, [optimizer], Progress(1, 1))
    found = load_file(path)
    assert all(torch.equal(found[f"inner/0/{name}"], tensor.cpu()) for name, tensor in kept.items())
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]


def test_all_of_it_comes_back(saved):
    path, outer, optimizer = saved
    _, again, fresh = make(seed=1)
    for state, known in zip(again.fragments, outer.fragments, strict=True):
        state.last_published = known.last_published
    assert restore(path, again, [fresh]) == (Progress(8, 16), True)
    for state, known in zip(again.fragments, outer.fragments, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state.residual, known.residual, strict=True))
        assert all(
            torch.equal(a, b)
            for a, b in zip(state.buffers["momentum"], known.buffers["momentum"], strict=True)
        )
        assert any(residual.any() for residual in known.residual)
    ours, theirs = fresh.state_dict()["state"], optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[i]["exp_avg"], theirs[i]["exp_avg"]) for i in theirs)


def test_it_is_saved_whatever_device_new_tensors_are_on(tmp_path):
    (_, outer, optimizer), (_, other, fresh) = trained(), make()
    torch.set_default_device("meta")
    try:
        CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(8, 16))
        restored = restore(tmp_path / "t", other, [fresh])
    finally:
        torch.set_default_device(None)
    assert restored == (Progress(8, 16), True)
    assert all(
        map(torch.equal, outer.fragments[0].buffers["momentum"], other.fragments[0].buffers["momentum"])
    )
