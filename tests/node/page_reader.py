"""Reads off the page what a person would: its words, and the pixels of its drawings."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from tests.node.browser import Page

FAINT = 60
"""Colours that differ by up to this, summed over red, green and blue, look alike: edges are blended."""

# Reads from a copy: the browser complains about a canvas that is read again and again.
_PIXELS = """((canvas, x, y, side) => {
  const ratio = canvas.width / canvas.clientWidth, reach = (side - 1) / 2;
  const copy = new OffscreenCanvas(side, side).getContext("2d", { willReadFrequently: true });
  const [left, top] = [Math.floor(x * ratio) - reach, Math.floor(y * ratio) - reach];
  copy.drawImage(canvas, left, top, side, side, 0, 0, side, side);
  return [...copy.getImageData(0, 0, side, side).data];
})"""
_COLOUR = """(name => {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number);
  probe.remove();
  return found.slice(0, 3);
})"""


async def shown(tab: Page, url: str, **how: int) -> None:
    """Open the page, and wait until it has fetched and drawn all that the server has."""
    await tab.open(url, **how)
    await tab.until("gossamer.complete && gossamer.connection === 'live'")
    await tab.drawn()


async def text(tab: Page, selector: str) -> str:
    found: str = await tab.evaluate(f"document.querySelector({selector!r}).innerText")
    return found


async def rows_of(tab: Page, table: str) -> list[dict[str, str]]:
    """A table's rows, with cells by their column's title."""
    found: list[dict[str, str]] = await tab.evaluate(
        f"""(table => {{
          const titles = [...table.querySelectorAll('thead th')].map(head => head.innerText.trim());
          return [...table.querySelectorAll('tbody tr')].map(row =>
            Object.fromEntries([...row.children].map((cell, i) => [titles[i], cell.innerText.trim()])));
        }})(document.querySelector({table!r}))"""
    )
    return found


async def pixels(tab: Page, canvas: str, x: float, y: float, side: int) -> list[list[int]]:
    """Red, green, blue and alpha of the pixels in a square around a place on a canvas."""
    place = f"document.querySelector({canvas!r}), {x}, {y}, {side}"
    values: list[int] = await tab.evaluate(f"{_PIXELS}({place})")
    return [values[at : at + 4] for at in range(0, len(values), 4)]


async def colour(tab: Page, name: str) -> list[int]:
    """Red, green and blue of one of the style sheet's colours."""
    found: list[int] = await tab.evaluate(f"{_COLOUR}({name!r})")
    return found


async def is_inked(tab: Page, canvas: str, name: str, x: float, y: float) -> bool:
    """Whether there is a pixel of this colour within two pixels of a place on a canvas."""
    wanted = await colour(tab, name)
    seen = [rgba for rgba in await pixels(tab, canvas, x, y, 5) if rgba[3] >= 128]
    return any(sum(abs(a - b) for a, b in zip(rgba, wanted, strict=False)) < FAINT for rgba in seen)


async def curve_goes_through(tab: Page, number: int, canvas: str, field: str, name: str, round_: int) -> bool:
    """Whether a curve is drawn where a round's value belongs."""
    x, y = (await tab.evaluate(f"gossamer.place({number}, {round_})"))[field]
    return await is_inked(tab, canvas, name, x, y)


async def has_cell(tab: Page, member: str, round_: int) -> bool:
    """Whether the matrix has a mark where a member's delta of a round belongs."""
    x, y = await tab.evaluate(f"gossamer.cell({member!r}, {round_})")
    ((*found, _),) = await pixels(tab, "#matrix", x, y, 1)
    return found != await colour(tab, "cell")


def edges_of(graph: dict[str, Any]) -> set[frozenset[str]]:
    """The pairs of node ids between which a thread is drawn."""
    return {frozenset(pair) for pair in graph["edges"]}


def quiet(tab: Page, url: str) -> None:
    """Check that there was no complaint, and no request to anybody but the node."""
    assert not tab.complaints
    hosts = {urlsplit(asked).netloc for asked in tab.requests if asked.startswith(("http", "ws"))}
    assert hosts == {urlsplit(url).netloc}
