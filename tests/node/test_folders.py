"""`gossamer.node.home`: which node is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.node.home import Home, node_in
from gossamer.protocol.errors import ConfigError
from tests.protocol import builders

HERE = builders.manifest(admission=builders.admission(), name="here")
ELSEWHERE = builders.manifest(admission=builders.admission(), name="elsewhere")


def test_the_node_of_this_machine_is_meant_if_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no node in"):
        node_in(None)
    for name, manifest in (("one", HERE), ("one-bootstrap", HERE)):
        home = Home(tmp_path / name)
        home.create()
        home.adopt(manifest)
    assert node_in(None).root == tmp_path / "one"
    assert node_in(tmp_path / "other").root == tmp_path / "other"
    home = Home(tmp_path / "two")
    home.create()
    home.adopt(ELSEWHERE)
    with pytest.raises(ConfigError, match="which node"):
        node_in(None)
