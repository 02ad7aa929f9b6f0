"""`gossamer.node.adapters.transformers`: whole files or none, and never a reason not to train."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gossamer.node.adapters.transformers import keep_pretrained
from gossamer.node.exports.export import frozen_names
from gossamer.node.home import Home


class Part:
    """Whatever has a `save_pretrained`."""

    def __init__(self, *files: str, error: Exception | None = None) -> None:
        self.files = files
        self.error = error

    def save_pretrained(self, folder: str) -> None:
        for name in self.files:
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{name} {vars(self).get('architectures', '')}")
        if self.error is not None:
            raise self.error


class Configured(nn.Linear):
    def __init__(self, **parts: Any) -> None:
        super().__init__(1, 1)
        for name, part in parts.items():
            setattr(self, name, part)


def kept(home: Home) -> dict[str, str]:
    """What is in the folder, by path."""
    files = [path for path in home.pretrained_path.rglob("*") if path.is_file()]
    return {str(path.relative_to(home.pretrained_path)): path.read_text() for path in files}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_configuration_and_tokenizer_are_kept_for_their_owner_alone(home: Home) -> None:
    model = Configured(config=Part("config.json"), generation_config=Part("generation_config.json"))
    keep_pretrained(home, model, Part("tokenizer.json", "templates/chat.jinja"))
    assert kept(home) == {
        "config.json": "config.json ['Configured']",
        "generation_config.json": "generation_config.json ",
        "tokenizer.json": "tokenizer.json ",
        "templates/chat.jinja": "templates/chat.jinja ",
        "frozen.json": "[]",
    }
    assert not hasattr(model.config, "architectures"), "the model's own is as it was"
    assert (home.pretrained_path / "config.json").stat().st_mode & 0o077 == 0
    keep_pretrained(home, Configured(config=Part("config.json", "more.json")))
    assert "more.json" in kept(home) and "tokenizer.json" in kept(home)
    assert [path.name for path in home.root.iterdir()] == ["pretrained"]


def test_a_model_that_fsdp_shards_is_kept_under_its_own_name(home: Home) -> None:
    """It renames the class."""

    class FSDPConfigured(Configured):
        pass

    keep_pretrained(home, FSDPConfigured(config=Part("config.json")))
    assert kept(home)["config.json"] == "config.json ['Configured']"


@pytest.mark.parametrize("model", [nn.Linear(1, 1), Configured(config={"hidden": 3})])
def test_other_models_have_nothing_to_keep(home: Home, model: nn.Module) -> None:
    keep_pretrained(home, model, Part("tokenizer.json"))
    assert not home.pretrained_path.exists()


@pytest.mark.parametrize(
    "error",
    [ValueError("contradicts itself"), OSError("disk full"), TypeError("not JSON"), NotImplementedError("x")],
)
def test_what_cannot_be_kept_is_only_said(
    home: Home, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with caplog.at_level(logging.WARNING, "gossamer.peer"):
        keep_pretrained(home, Configured(config=Part("config.json", error=error)))
    assert str(error) in caplog.text
    assert not home.pretrained_path.exists(), "nothing that is half of it"


def test_the_names_of_what_the_swarm_lacks_are_kept(home: Home) -> None:
    model = Configured(config=Part("config.json"))
    model.bias.requires_grad_(False)
    model.norm = nn.BatchNorm1d(1)
    keep_pretrained(home, model)
    assert frozen_names(home) == ("bias", "norm.running_mean", "norm.running_var")
