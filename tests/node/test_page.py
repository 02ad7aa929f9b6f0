"""The page: one document with a strict policy; and, where a browser is, what it shows of a recorded swarm."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from importlib import resources

import pytest_asyncio

from gossamer.node.daemon.dashboard import page as node_page
from gossamer.node.daemon.monitoring.members import LISTED
from tests.node.browser import BROWSER, Page, browser, in_browser
from tests.node.page_reader import curve_goes_through, edges_of, has_cell, is_inked, quiet, shown, text
from tests.node.page_server import PageServer
from tests.node.recorded_swarm import CLIPPED, LATE, VOID, Recorded

# --- the document ---------------------------------------------------------------------------------


def test_every_file_of_the_folder_is_in_the_document():
    folder = resources.files(node_page)
    names = {f.name for f in folder.iterdir() if f.name.endswith((".js", ".css", ".html"))}
    assert names == {*node_page.SCRIPTS, "page.css", "index.html"}
    document = node_page.document()
    for name in (*node_page.SCRIPTS, "page.css"):
        assert (folder / name).read_text(encoding="utf-8") in document


def test_nothing_is_fetched_from_elsewhere():
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", node_page.document())
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # a namespace, not an address
    assert not re.search(r"<(?:script|img|iframe)[^>]+src=|@import|url\(", node_page.document())


def test_the_policy_allows_this_script_and_style_and_nothing_else():
    document, policy = node_page.document(), node_page.policy()
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.search(r"<[^>]+\s(?:style|on\w+)=", document), "inline attributes need 'unsafe-inline'"


def test_what_can_be_reached_by_keyboard_has_a_role_and_a_name():
    """A name on an element without a role is none to a screen reader."""
    document = node_page.document()
    reached = re.findall(r"<(?:canvas|div|ol)\b[^>]*tabindex=\"0\"[^>]*>", document)
    assert len(reached) >= 4
    for element in reached:
        assert " role=" in element, element
        assert " aria-label=" in element or 'id="graph"' in element, element  # that one's says who is there


def test_text_never_becomes_markup():
    for name in node_page.SCRIPTS:
        script = (resources.files(node_page) / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", script
        )


# --- in a browser ---------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def tab() -> AsyncIterator[Page]:
    assert BROWSER is not None
    async with browser(BROWSER) as page:
        yield page


@in_browser
async def test_four_nodes(tab):
    server = PageServer(Recorded(4, 60))
    async with server.serving() as url:
        await shown(tab, url, height=2600)
        state = server.swarm.snapshot()
        assert await text(tab, "#swarm") == "stdlib-tiny"
        assert "4 of 4" in await text(tab, "#figures")
        assert "identical at round 48" in await text(tab, "#figures")
        assert f"{state['trainer']['loss']:.3f}" in await text(tab, "#figures")
        graph = await tab.evaluate("gossamer.graph")
        assert {node["id"] for node in graph["nodes"]} == set(server.swarm.ids)
        ids = server.swarm.ids
        assert edges_of(graph) == {frozenset((ids[a], ids[b])) for a, b in server.swarm.links}
        assert await tab.evaluate("document.querySelectorAll('#members-table tbody tr').length") == 4
        assert await tab.evaluate("document.querySelectorAll('#links-table tbody tr').length") == 3
        deltas = sum(len(row[6]) for row in server.swarm.rows)
        await tab.until(f"gossamer.matrix.cells === {deltas}")
        assert await tab.evaluate("gossamer.rounds") == {
            "count": 60,
            "first": 1,
            "last": 60,
            "deltas": deltas,
        }
        for curve in await tab.evaluate("gossamer.curves"):
            assert curve["rounds"] == 60
        losses = [row[2] for row in server.swarm.rows]
        curve = (await tab.evaluate("gossamer.curves"))[0]
        assert curve["low"] < min(losses) and curve["high"] > max(losses)
        assert "node-2 joined the swarm" in await text(tab, "#events")
        quiet(tab, url)


@in_browser
async def test_what_is_drawn_is_what_the_node_says(tab):
    server = PageServer(Recorded(4, 60))
    async with server.serving() as url:
        await shown(tab, url, height=2600)
        rows, ids = server.swarm.rows, server.swarm.ids
        for scale in (0, 1):
            await tab.evaluate(f"document.querySelectorAll('#scale button')[{scale}].click()")
            await tab.drawn()
            assert (await tab.evaluate("gossamer.curves"))[0]["log"] == bool(scale)
            for row in rows[::7]:
                assert await curve_goes_through(tab, 0, "#loss", "loss", "swarm", row[0])
                assert await curve_goes_through(tab, 1, "#agreement", "agreement", "swarm", row[0])
        await tab.until("gossamer.matrix.complete")
        for row in rows[:16]:
            there = {ids[delta[0]]: delta[5] for delta in row[6]}
            for member in ids:
                if not there.get(member, 0) & VOID:  # a void one is a frame
                    assert await has_cell(tab, member, row[0]) == (member in there)
                if there.get(member, 0) & LATE:
                    x, y = await tab.evaluate(f"gossamer.cell({member!r}, {row[0]})")
                    assert await is_inked(tab, "#matrix", "warn", x, y)
        await shown(tab, url)
        assert (await tab.evaluate("gossamer.curves"))[0]["log"], "the scale is remembered"
        quiet(tab, url)


@in_browser
async def test_it_follows_the_swarm(tab):
    server = PageServer(Recorded(4, 60))
    async with server.serving() as url:
        await shown(tab, url, height=2600)
        for _ in range(5):
            server.step()
        await tab.until("gossamer.rounds.last === 65 && gossamer.state.round === 65")
        await tab.until(f"gossamer.rounds.deltas === {sum(len(row[6]) for row in server.swarm.rows)}")
        await tab.until("gossamer.curves[0].rounds === 65")
        assert (await text(tab, "#figures")).split()[:2] == ["Round", "65"]
        quiet(tab, url)


@in_browser
async def test_a_late_delta_shows_in_its_round(tab):
    server = PageServer(Recorded(4, 20, seed=3))
    row = next(row for row in server.swarm.rows if len(row[6]) < 4)
    async with server.serving() as url:
        await shown(tab, url, height=2600)
        before = await tab.evaluate("gossamer.matrix.cells")
        server.swarm._late(row)
        server.publish("rounds", {"authors": server.swarm.ids, "rounds": [row]})
        await tab.until(f"gossamer.matrix.cells === {before + 1}")
        assert await tab.evaluate("gossamer.rounds.count") == 20
        quiet(tab, url)


@in_browser
async def test_it_reconnects_and_learns_what_it_missed(tab):
    server = PageServer(Recorded(4, 60))
    async with server.serving() as url:
        await shown(tab, url)
        kept = await tab.evaluate("gossamer.notices.length")
        server.refuse = True
        server.drop()
        await tab.until("gossamer.connection === 'lost'")
        assert "Reconnecting" in await text(tab, "#banner")
        for _ in range(7):
            server.step()
        server.refuse = False
        await tab.until("gossamer.connection === 'live' && gossamer.rounds.last === 67")
        assert await tab.evaluate("document.querySelector('#banner').hidden")
        await tab.until(f"gossamer.rounds.deltas === {sum(len(row[6]) for row in server.swarm.rows)}")
        await tab.until(f"gossamer.notices.length === {kept}")  # told again, not twice


@in_browser
async def test_a_first_node_and_a_joiner(tab):
    alone, joining = PageServer(Recorded(1, 0)), PageServer(Recorded(4, 20, state="joining"))
    async with alone.serving() as url:
        await shown(tab, url)
        assert "gossamer node --join 192.0.2.1:7700" in await text(tab, "#graph-empty")
        assert "No round has a delta yet" in await text(tab, "#rounds-empty")
        quiet(tab, url)
    tab.requests.clear()
    tab.complaints.clear()  # the first server is gone, and its page may have noticed
    async with joining.serving() as url:
        await shown(tab, url)
        assert "17 of 48 chunks" in await text(tab, "#progress")
        assert "not known until it has joined" in await text(tab, "#figures")
        assert "–" in await text(tab, "#figures")  # what is not known is not a zero


@in_browser
async def test_names_are_text(tab):
    swarm = Recorded(4, 10)
    swarm.names[1] = "<img src=x onerror=alert(1)>"
    server = PageServer(swarm)
    async with server.serving() as url:
        await shown(tab, url)
        assert swarm.names[1] in await text(tab, "#members-table")
        assert await tab.evaluate("document.images.length") == 0
        quiet(tab, url)


@in_browser
async def test_the_policy_stops_other_scripts(tab):
    async with PageServer(Recorded(4, 10)).serving() as url:
        await shown(tab, url)
        script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
        await tab.evaluate(f"document.body.append({script})")
        assert await tab.evaluate("window.ran === undefined")
        assert any("Content Security Policy" in complaint for complaint in tab.complaints)


@in_browser
async def test_keyboard_and_pointer(tab):
    server = PageServer(Recorded(4, 60))
    async with server.serving() as url:
        await shown(tab, url, height=2600)
        await tab.evaluate("document.querySelector('#graph').focus()")
        await tab.key("ArrowRight")
        assert await text(tab, "#inspector-title") == "node-2"
        await tab.evaluate("document.querySelector('#matrix').focus()")
        await tab.key("ArrowLeft")
        await tab.key("ArrowDown")
        assert await tab.evaluate("gossamer.view.cursor") == 59
        assert await tab.evaluate("gossamer.view.row") == server.swarm.ids[1]
        assert "Round 59" in await text(tab, "#readout")
        self_ = next(
            n for n in (await tab.evaluate("gossamer.graph"))["nodes"] if n["id"] == server.swarm.ids[2]
        )
        box = await tab.evaluate(
            "(({x, y}) => ({x, y}))(document.querySelector('#graph').getBoundingClientRect())"
        )
        await tab.mouse("mouseMoved", box["x"] + self_["x"], box["y"] + self_["y"])
        await tab.until("document.querySelector('#inspector-title').innerText === 'node-3'")
        await tab.evaluate("document.querySelectorAll('#axis button')[1].click()")
        assert await tab.evaluate("gossamer.view.byTokens")
        quiet(tab, url)


@in_browser
async def test_a_phone_does_not_scroll_sideways(tab):
    async with PageServer(Recorded(4, 60)).serving() as url:
        await shown(tab, url, width=390, height=844)
        assert await tab.evaluate("document.documentElement.scrollWidth") == 390
        quiet(tab, url)


@in_browser
async def test_64_nodes_and_10000_rounds(tab, record_property):
    server = PageServer(Recorded(64, 10_000))
    async with server.serving() as url:
        await shown(tab, url, height=2600)
        swarm = server.swarm
        deltas = sum(len(row[6]) for row in swarm.rows)
        assert await tab.evaluate("[gossamer.rounds.count, gossamer.rounds.deltas]") == [10_000, deltas]
        flags = {
            flag
            for row in swarm.rows
            for delta in row[6]
            for flag in (LATE, VOID, CLIPPED)
            if delta[5] & flag
        }
        assert flags == {LATE, VOID, CLIPPED}
        await tab.until(f"gossamer.matrix.cells === {sum(len(row[6]) for row in swarm.rows[-128:])}")
        await tab.evaluate("document.querySelectorAll('#span button')[3].click()")
        await tab.until("gossamer.matrix.perColumn > 1 && gossamer.matrix.complete")
        assert await tab.evaluate("gossamer.view.range") == [1, 10_000]
        assert await tab.evaluate("gossamer.curves[0].rounds") == 10_000
        health = [node["health"] for node in (await tab.evaluate("gossamer.graph"))["nodes"]]
        assert {h: health.count(h) for h in set(health)} == {"alive": 54, "suspect": 3, "down": 3, "left": 4}
        assert "54 of 57" in await text(tab, "#figures")
        assert "1 differs, 1 with other records, 1 not known yet" in await text(tab, "#figures")
        for _ in range(10):
            server.step()
            await tab.until(f"gossamer.rounds.last === {len(swarm.rows)}")
            await tab.drawn()
        figures = await tab.evaluate("gossamer.frames")
        for name, value in figures.items():
            record_property(name, value)
        print(f"script a frame, 64 nodes and {len(swarm.rows)} rounds: {figures}")
        quiet(tab, url)


@in_browser
async def test_a_thousand_nodes(tab, record_property):
    server = PageServer(Recorded(1024, 1000))
    async with server.serving() as url:
        await shown(tab, url, height=2600)
        said = server.swarm.snapshot()
        assert len(said["members"]) == LISTED and len(json.dumps(said)) < 100_000, "bytes a second"
        alive = said["by_health"]["alive"]
        assert f"{1 + alive:,} of 1,024 members alive" in await text(tab, "#graph-summary")
        assert f"of {1 + alive + said['by_health']['suspect']:,}" in await text(tab, "#figures")
        rows = await tab.evaluate("document.querySelectorAll('#members-table tbody tr').length")
        assert rows == 1 + LISTED
        assert "suspect" in await text(tab, "#members-table tbody tr:nth-child(2)"), "as the node lists them"
        await tab.evaluate("document.querySelectorAll('#span button')[3].click()")
        await tab.until("gossamer.matrix.complete")
        for _ in range(10):
            server.step()
            await tab.until(f"gossamer.rounds.last === {len(server.swarm.rows)}")
            await tab.drawn()
        figures = await tab.evaluate("gossamer.frames")
        for name, value in figures.items():
            record_property(name, value)
        print(f"script a frame, 1,024 nodes and {len(server.swarm.rows)} rounds: {figures}")
        quiet(tab, url)
