"""The page's scripts without a browser: streams that fall silent, answers that come late, liars' rounds."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from gossamer.node.daemon.dashboard import page

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node (JavaScript) here")
@pytest.mark.parametrize(
    "case", ["silence", "race", "ahead", "authors", "apart", "breaks", "token", "heldout", "links", "alone"]
)
def test_the_scripts(case: str) -> None:
    assert NODE is not None
    script = Path(__file__).with_name("page_in_node.js")
    with resources.as_file(resources.files(page)) as folder:
        done = subprocess.run(
            [NODE, script, folder, case], capture_output=True, text=True, timeout=200, check=False
        )
    assert done.returncode == 0, done.stderr
