"""The page of a node in a live swarm of four daemons: it shows what their `/status` says."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.net.nodes import LocalNode, LocalNodes, small_manifest
from tests.node.browser import BROWSER, Page, browser, in_browser
from tests.node.page_reader import curve_goes_through, edges_of, has_cell, quiet, rows_of, shown, text

NODES = 4


def web(nodes: list[LocalNode]) -> set[frozenset[str]]:
    """The links that the nodes themselves say they have."""
    return {frozenset((n.status["node_id"], link["node_id"])) for n in nodes for link in n.status["links"]}


async def told(url: str) -> dict[str, Any]:
    """All rounds that a node tells of."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}api/rounds") as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def graph_once(tab: Page, links: set[frozenset[str]]) -> dict[str, Any]:
    """The graph as soon as it has as many threads as there are links: rows take a few seconds."""
    await tab.until(f"gossamer.graph.edges.length === {len(links)}")
    graph: dict[str, Any] = await tab.evaluate("gossamer.graph")
    return graph


@in_browser
async def test_the_page_shows_what_the_nodes_say(tmp_path: Path) -> None:
    manifest, phi = small_manifest()
    assert BROWSER is not None
    async with LocalNodes(tmp_path, manifest, phi) as swarm, browser(BROWSER) as tab:
        nodes = await swarm.grow(NODES)
        await swarm.until(
            lambda: all(n.status["clock"] >= 16 and len(n.status["links"]) == NODES - 1 for n in nodes),
            60,
            "some rounds of a whole web",
        )
        await swarm.agree()
        facts = nodes[0].home.read_daemon()
        assert facts is not None
        url = f"http://{facts['admin']}/"
        await shown(tab, url, height=2600)
        status = nodes[0].status
        await the_graph(tab, nodes)
        await the_members(tab, status)
        await the_curves(tab, url, status)
        await the_matrix(tab, status)
        assert f"{NODES} of {NODES}" in await text(tab, "#figures")
        events = await text(tab, "#events")
        assert all(name in events for name in ("heard of", *(node.name for node in nodes[1:])))
        quiet(tab, url)
        await a_death(tab, swarm, nodes)
        quiet(tab, url)


async def the_graph(tab: Page, nodes: list[LocalNode]) -> None:
    links = web(nodes)
    assert len(links) == NODES * (NODES - 1) // 2
    graph = await graph_once(tab, links)
    assert edges_of(graph) == links, "those of others, too"
    health = {node["id"]: node["health"] for node in graph["nodes"]}
    assert health == {node.status["node_id"]: "alive" for node in nodes}


async def the_members(tab: Page, status: dict[str, Any]) -> None:
    figures = {member["name"]: str(member["round"]) for member in status["members"]}
    figures[f"{status['name']} (this node)"] = str(status["round"])
    await tab.until(f"gossamer.state.members.every(m => m.round >= {min(map(int, figures.values()))})")
    await tab.until(f"gossamer.state.round === {status['round']}")
    assert {row["Name"]: row["Round"] for row in await rows_of(tab, "#members-table")} == figures
    assert (await text(tab, "#figures")).split()[:2] == ["Round", str(status["round"])]
    assert len(await rows_of(tab, "#links-table")) == len(status["links"])


async def the_curves(tab: Page, url: str, status: dict[str, Any]) -> None:
    last = max(status["round"], *(member["round"] for member in status["members"]))
    await tab.until(f"gossamer.rounds.last === {last} && gossamer.curves[0].rounds === gossamer.rounds.count")
    for round_ in range(2, last, 5):
        assert await curve_goes_through(tab, 0, "#loss", "loss", "swarm", round_)
    agreements = [row[5] for row in (await told(url))["rounds"]]
    await tab.evaluate("document.querySelector('#matrix').focus()")
    await tab.key("End")
    for _ in itertools.takewhile(lambda agreement: agreement is None, reversed(agreements)):
        await tab.key("ArrowLeft")  # to the newest round that had two deltas
    await tab.until("document.querySelector('#readout').innerText.includes('agreement')")
    assert f"{abs(status['agreement']):.3f}" in await text(tab, "#readout")
    await tab.key("Escape")  # the cursor's line would be taken for a cell


async def the_matrix(tab: Page, status: dict[str, Any]) -> None:
    """The last cell of each row is that of the member's last round, and there are as many as records."""
    await tab.until("gossamer.matrix.complete")
    assert (await tab.evaluate("gossamer.matrix"))["cells"] == status["records"]
    rounds = {member["node_id"]: member["round"] for member in status["members"]}
    rounds[status["node_id"]] = status["round"]
    for node_id, round_ in rounds.items():
        assert await has_cell(tab, node_id, round_)
        for later in range(round_ + 1, max(rounds.values()) + 1):
            assert not await has_cell(tab, node_id, later)


async def a_death(tab: Page, swarm: LocalNodes, nodes: list[LocalNode]) -> None:
    """A node that is killed is down, and its threads are gone."""
    gone = nodes[-1].status["node_id"]
    nodes[-1].signal(signal.SIGKILL)
    await tab.until(f"gossamer.graph.nodes.find(n => n.id === '{gone}').health === 'down'")
    await swarm.until(
        lambda: all(len(n.status["links"]) == NODES - 2 for n in nodes[:-1]), 30, "links to it are given up"
    )
    links = web(nodes[:-1])
    assert edges_of(await graph_once(tab, links)) == links
    assert "n3" in await text(tab, "#events") and "is down" in await text(tab, "#events")
    rows = {row["Name"]: row["Health"] for row in await rows_of(tab, "#members-table")}
    assert rows["n3"] == "down"
