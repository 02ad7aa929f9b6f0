"""The README's picture of the page: vectors that need nothing else, and that show the page as it is."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from tests.node.browser import BROWSER, browser, in_browser
from tests.node.page_picture import drawn_anew

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "page.svg"
SVG = "http://www.w3.org/2000/svg"
SHAPES = {"svg", "title", "g", "rect", "path", "circle", "text"}


def words(picture: ET.Element) -> list[str]:
    """Where lines end is a matter of fonts."""
    return " ".join(picture.itertext()).split()


def shapes(picture: ET.Element) -> Counter[str]:
    """Counts by kind. A line that another font breaks is one text more, so texts do not count."""
    kinds = (element.tag.removeprefix(f"{{{SVG}}}") for element in picture.iter())
    return Counter(kind for kind in kinds if kind != "text")


def test_the_picture_is_made_of_shapes_and_words_alone():
    text = PICTURE.read_text("utf-8")
    assert len(text.encode()) < 250_000
    assert {element.tag for element in ET.fromstring(text).iter()} == {
        f"{{{SVG}}}{shape}" for shape in SHAPES
    }
    assert not re.search(r"href|url\(|data:|://|@import", text.replace(SVG, ""))


def test_the_picture_shows_the_graph_the_curves_and_the_matrix():
    said = words(ET.parse(PICTURE).getroot())
    assert said.count("node-12") == 2  # in the graph, and beside its row
    assert {"Swarm", "Loss", "Agreement", "Staleness", "Contributions"} <= set(said)


@in_browser
async def test_the_picture_is_of_the_page_as_it_is():
    assert BROWSER is not None
    async with browser(BROWSER) as tab:
        picture = await drawn_anew(tab)
    kept = ET.parse(PICTURE).getroot()
    assert words(picture) == words(kept), (
        "python -m tests.node.page_picture docs/pictures/page.svg draws it anew"
    )
    assert shapes(picture) == shapes(kept)
