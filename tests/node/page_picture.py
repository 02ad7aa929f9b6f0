"""Draws the upper part of the page, with a recorded swarm, as vectors for the README.

To draw it again:   python -m tests.node.page_picture docs/pictures/page.svg

Boxes and words come from the browser's layout. What the page draws on canvases, `page_picture.js` records
while it is drawn. Lengths are in CSS pixels.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any

from tests.node.browser import BROWSER, Page, browser
from tests.node.page_reader import shown
from tests.node.page_server import PageServer
from tests.node.recorded_swarm import Recorded

MEMBERS, ROUNDS = 12, 120
WIDTH = 1280
MARGIN = 20
"""Space below the last panel drawn."""
ASCENT = 0.905
"""How far a line's baseline lies below its top in Helvetica and Arial, in font sizes."""
RADIUS = "border-top-left-radius"
SIDES = ("top", "right", "bottom", "left")
STYLES = (
    *("color", "background-color", "background-image", RADIUS, "transform"),
    *("width", "height", "font-family", "font-size", "font-weight", "letter-spacing"),
    *(f"border-{side}-{what}" for side in SIDES for what in ("width", "color")),
    *(f"outline-{what}" for what in ("style", "width", "offset", "color")),
    *("fill", "stroke", "stroke-width"),
)
FAMILY = "Helvetica, Arial, sans-serif"
TRANSPARENT = "rgba(0, 0, 0, 0)"


@dataclass(frozen=True)
class Box:
    """The browser's layout of an element, a pseudo-element or a text."""

    tag: str
    attributes: dict[str, str]
    style: dict[str, str]
    bounds: tuple[int, int, int, int]
    """x, y, width, height, in whole pixels as browsers paint them."""
    lines: list[tuple[float, float, str]]
    """x, top and words of each line of a text."""

    def px(self, name: str) -> float:
        found = re.fullmatch(r"(-?[\d.]+)px", self.style[name])
        return float(found[1]) if found else 0.0


def boxes(snapshot: dict[str, Any]) -> Iterator[Box]:
    """Boxes in document order, from the result of the DevTools protocol's DOMSnapshot.captureSnapshot."""
    document, strings = snapshot["documents"][0], snapshot["strings"]
    nodes, layout, texts = document["nodes"], document["layout"], document["textBoxes"]
    lines: dict[int, list[tuple[float, float, str]]] = {}
    for i, at in enumerate(texts["layoutIndex"]):
        (x, top, *_), start = texts["bounds"][i], texts["start"][i]
        words = strings[layout["text"][at]][start : start + texts["length"][i]]
        lines.setdefault(at, []).append((x, top, words.rstrip()))
    for at, node in enumerate(layout["nodeIndex"]):
        said = [strings[i] for i in nodes["attributes"][node]]
        yield Box(
            strings[nodes["nodeName"][node]].lower(),
            dict(zip(said[::2], said[1::2], strict=True)),
            dict(zip(STYLES, (strings[i] for i in layout["styles"][at]), strict=False)),
            on_pixels(*layout["bounds"][at]),
            lines.get(at, []),
        )


def on_pixels(x: float, y: float, width: float, height: float) -> tuple[int, int, int, int]:
    left, top, right, bottom = (floor(edge + 0.5) for edge in (x, y, x + width, y + height))
    return left, top, right - left, bottom - top


def element(tag: str, text: str | None = None, **attributes: str | float) -> ET.Element:
    """An SVG element, with numbers rounded to what can be seen."""
    made = ET.Element(tag)
    made.text = text
    for name, value in attributes.items():
        made.set(name.replace("_", "-"), value if isinstance(value, str) else f"{round(value, 1):g}")
    return made


def rounded(box: Box, grown: float, **attributes: str | float) -> ET.Element:
    """The box's rectangle, larger by `grown` on all sides."""
    x, y, width, height = box.bounds
    radius = min(width, height) / 2 if box.style[RADIUS].endswith("%") else box.px(RADIUS)
    corners = {"rx": radius + grown} if radius else {}
    size = {"width": width + 2 * grown, "height": height + 2 * grown}
    return element("rect", x=x - grown, y=y - grown, **size, **corners, **attributes)


def ground_of(box: Box) -> Iterator[ET.Element]:
    x, y, width, height = box.bounds
    ground = box.style["background-color"].replace(TRANSPARENT, "none")
    borders = [(box.px(f"border-{side}-width"), box.style[f"border-{side}-color"]) for side in SIDES]
    thick, ink = borders[0]
    if box.style["transform"] != "none":  # its bounds are those after the rotation
        wide, high = box.px("width"), box.px("height")
        place = f"translate({x + width / 2:g} {y + height / 2:g}) {box.style['transform']}"
        yield element("rect", x=-wide / 2, y=-high / 2, width=wide, height=high, fill=ground, transform=place)
    elif thick and len(set(borders)) == 1:
        yield rounded(box, -thick / 2, fill=ground, stroke=ink, stroke_width=thick)
    else:
        if ground != "none":
            yield rounded(box, 0, fill=ground)
        top, right, bottom, left = (thick for thick, _ in borders)
        lines = (
            (x, y, width, top),
            (x + width - right, y, right, height),
            (x, y + height - bottom, width, bottom),
            (x, y, left, height),
        )
        for (x, y, width, height), (thick, ink) in zip(lines, borders, strict=True):
            if thick:
                yield element("rect", x=x, y=y, width=width, height=height, fill=ink)


def marks_of(box: Box) -> Iterator[ET.Element]:
    """The extra marks of legends: an outline, and a cross made of two gradients."""
    style, thick = box.style, box.px("outline-width")
    if style["outline-style"] != "none" and thick:
        dash = {"stroke_dasharray": "2 1.5"} if style["outline-style"] == "dashed" else {}
        grown = box.px("outline-offset") + thick / 2
        yield rounded(box, grown, fill="none", stroke=style["outline-color"], stroke_width=thick, **dash)
    if style["background-image"] != "none":
        x, y, width, height = box.bounds
        path = f"M{x + 2} {y + 2}l{width - 4} {height - 4}m0 {4 - height}l{4 - width} {height - 4}"
        yield element("path", d=path, stroke=style["color"], stroke_width=2)


def words_of(box: Box) -> Iterator[ET.Element]:
    size, weight, spacing = box.px("font-size"), box.style["font-weight"], box.px("letter-spacing")
    look: dict[str, str | float] = {"font_size": size, "fill": box.style["color"]}
    if weight != "400":
        look["font_weight"] = weight
    if spacing:
        look["letter_spacing"] = f"{spacing:g}"
    if "monospace" in box.style["font-family"]:
        look["font_family"] = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    for x, top, words in box.lines:
        yield element("text", words, x=x, y=top + round(ASCENT * size), **look)


async def drawn_anew(tab: Page) -> ET.Element:
    """The picture of the page, opened in this tab."""
    recorder = Path(__file__).with_suffix(".js").read_text("utf-8")
    await tab.send("Page.addScriptToEvaluateOnNewDocument", source=recorder)
    async with PageServer(Recorded(MEMBERS, ROUNDS)).serving() as url:
        await shown(tab, url, width=WIDTH, height=3000)  # the page draws only what is in view
        await tab.until("gossamer.matrix.complete")
        await tab.drawn()
        return await picture(tab)


async def picture(tab: Page) -> ET.Element:
    """A picture of the page down to its rounds."""
    bottom = await tab.evaluate("document.querySelector('.rounds').getBoundingClientRect().bottom")
    height = round(bottom) + MARGIN
    size = {"width": WIDTH, "height": height, "viewBox": f"0 0 {WIDTH} {height}"}
    svg = element("svg", xmlns="http://www.w3.org/2000/svg", **size, font_family=FAMILY)
    svg.set("style", "font-variant-numeric: tabular-nums")
    svg.append(element("title", "The page that a node serves"))
    logo = ""
    for box in boxes(await tab.send("DOMSnapshot.captureSnapshot", computedStyles=STYLES)):
        x, y, width, area = *box.bounds[:3], box.bounds[2] * box.bounds[3]
        if x < 0 or y >= height or not area or not box.style:
            continue
        if box.tag == "canvas":
            if kept := await tab.evaluate(f"drawnOn({box.attributes['id']!r})"):
                svg.append(ET.fromstring(f'<g transform="translate({x} {y})">{kept}</g>'))
        elif box.tag == "svg":
            logo = f"translate({x} {y}) scale({width / float(box.attributes['viewBox'].split()[2]):g})"
        elif box.tag in ("path", "circle"):
            look = {name: box.style[name] for name in ("fill", "stroke", "stroke-width")}
            svg.append(element(box.tag, **box.attributes, **look, transform=logo))
        elif box.tag == "#text":  # a text has its parent's style
            svg.extend(words_of(box))
        else:
            svg.extend((*ground_of(box), *marks_of(box)))
    ET.indent(svg, "")
    return svg


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    if BROWSER is None:
        parser.error("no Chromium here; GOSSAMER_TEST_BROWSER may name one")
    async with browser(BROWSER) as tab:
        file.write_text(ET.tostring(await drawn_anew(tab), "unicode") + "\n", "utf-8")


if __name__ == "__main__":
    asyncio.run(_main())
