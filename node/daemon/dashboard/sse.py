"""The state of a node as the page and `gossamer top` show it: JSON, about once a second.

Ids are in hex, times and durations in seconds, sizes in bytes.
"""

import asyncio
import json
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gossamer.node import __version__
from gossamer.node.daemon.monitoring.events import Comparison, compare, summary
from gossamer.node.daemon.monitoring.round_history import Round, as_json, at_most, line_of
from gossamer.node.daemon.monitoring.status import LIVE, NodeView, finite, known_links, loss_of
from gossamer.node.daemon.monitoring.watching import TICK_S, Watching
from gossamer.protocol.access.acl import Role
from gossamer.protocol.membership.members import Health, Member
from gossamer.protocol.merge.contributions import Summary
from gossamer.protocol.records import MemberRecordBody

# --- Server-sent events for any number of pages up to a bound: serialised once, sent to all.
#
# https://html.spec.whatwg.org/multipage/server-sent-events.html

LISTENERS_MAX = 32
QUEUE_MAX = 30
"""How many events may wait for one listener: half a minute's worth. A slower listener is dropped."""

SEND_BUFFER_BYTES = 1 << 16
"""How much the system buffers for a page that reads nothing. By itself it would buffer megabytes, which take
many minutes to fill while such a page keeps its place."""

WRITE_TIMEOUT_S = 30.0


def event(name: str, data: Any) -> bytes:
    """One event with JSON data."""
    return event_of(name, to_json(data))


def event_of(name: str, data: bytes) -> bytes:
    """One event with data that is serialised already."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def to_json(data: Any) -> bytes:
    """Compact JSON, ASCII, in one line. Raises ValueError for what JSON cannot express, such as infinity."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


HEARTBEAT = b": still here\n\n"


@dataclass(eq=False, slots=True)
class _Listener:
    transport: asyncio.Transport | None
    queue: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        line = None if self.transport is None else self.transport.get_extra_info("socket")
        if line is not None:
            with suppress(OSError):  # from macOS, for a page that has been closed already
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def cut(self) -> None:
        """Close its connection at once, whatever is still to be sent."""
        if self.transport is not None:
            self.transport.abort()


class Feed:
    """The listeners to one node's events."""

    def __init__(self) -> None:
        self._listeners: set[_Listener] = set()

    def __len__(self) -> int:
        return len(self._listeners)

    def publish(self, events: Iterable[bytes]) -> None:
        """Queue events for all listeners; never waits."""
        data = b"".join(events)
        for listener in list(self._listeners) if data else ():
            if listener.queue.qsize() < QUEUE_MAX:
                listener.queue.put_nowait(data)
            else:
                self._let_go(listener)

    async def serve(
        self, request: web.Request, opening: Iterable[bytes], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Answer a request with `opening` and what is published from now on, until either side ends it."""
        if len(self._listeners) >= LISTENERS_MAX:
            raise web.HTTPServiceUnavailable(text="too many pages are open", headers={"Retry-After": "10"})
        listener = _Listener(request.transport)
        self._listeners.add(listener)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            data = b"".join(opening)
            while listener in self._listeners:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(data)
                data = await listener.queue.get()
        except (OSError, TimeoutError):  # the page was closed, or takes nothing
            pass
        finally:
            self._let_go(listener)
        return response

    def _let_go(self, listener: _Listener) -> None:
        self._listeners.discard(listener)
        listener.cut()
        listener.queue.put_nowait(b"")  # wakes `serve`, which may be waiting

    def close(self) -> None:
        """Drop all listeners."""
        for listener in list(self._listeners):
            self._let_go(listener)


def admin_state(view: NodeView, watching: Watching) -> dict[str, Any]:
    """What is shown about a node, its swarm and its members."""
    others = view.core.roster.members()
    claims = view.core.sealing.claims
    found = [compare(claims, m.record.body.claims) if m.health in LIVE else None for m in others]
    members = [_itself(view), *(_member(view, m, f) for m, f in zip(others, found, strict=True))]
    return {
        "time": round(time.time(), 3),
        "swarm": _swarm(view),
        "node": _node(view, watching),
        "now": {**_now(view, members), "agree": summary(claims, found)},
        "members": members,
        "links": _links(view, watching),
        "edges": known_links((link.node_id for link in view.links.values()), others),
    }


def _swarm(view: NodeView) -> dict[str, Any]:
    manifest, layout = view.core.manifest, view.core.layout
    pace = manifest.pace
    return {
        "id": view.core.swarm_id.hex(),
        "name": manifest.swarm.name,
        "task": manifest.task.name,
        "parameters": layout.numel,
        "tensors": sum(len(fragment.slots) for fragment in layout.fragments),
        "fragments": len(layout.fragments),
        "codec": manifest.outer.codec,
        "averaging": sorted({s.spec.averaging for fragment in layout.fragments for s in fragment.slots}),
        "pace": f"{pace.every_steps} steps" if pace.every_steps else f"{pace.every_seconds:g} s",
        "admission": manifest.admission.mode,
    }


def _node(view: NodeView, watching: Watching) -> dict[str, Any]:
    report = view.report
    return {
        "id": view.node_id.hex(),
        "name": view.core.info.name,
        "state": view.state,
        "trains": view.core.info.trains,
        "version": __version__,
        "uptime_s": round(view.uptime_s, 1),
        "addresses": list(view.core.own_record.addresses),
        "reachable": watching.vitals.reachable,
        "device": report.device if report else "",
        "folder": str(view.home.root.absolute()),
    }


def _now(view: NodeView, members: list[dict[str, Any]]) -> dict[str, Any]:
    core, report = view.core, view.report
    training = [m for m in members if m["trains"] and m["health"] in LIVE]
    fetching = view.archive.progress()
    return {
        "round": core.own_last,
        "clock": core.clock,
        "swarm_tokens": view.merging.tokens,
        "own_tokens": report.tokens if report else 0,
        "tokens_per_s": finite(report.tokens_per_s) or 0.0 if report else 0.0,
        "swarm_tokens_per_s": sum(member["tokens_per_s"] for member in training),
        "inner_steps": report.inner_steps if report else 0,
        "loss": loss_of(report),
        "val_loss": finite(report.val_loss) if report else None,
        "val_version": report.evaluated_version if report else 0,
        "val_round": report.evaluated_round if report else 0,
        "wait_fraction": report.wait_fraction if report else 0.0,
        "rounds_behind": view.merging.behind,
        "payloads_missing": len(core.fetcher.wants),
        "sealed_round": view.sealed_round,
        "closed_round": core.ledger.floor,
        "records": len(core.ledger),
        "version": view.merging.version,
        "fetching": list(fetching) if fetching else None,
    }


def _itself(view: NodeView) -> dict[str, Any]:
    report = view.report
    row = _row(view, view.node_id, view.core.own_record)
    if report is not None:  # newer than what the row tells others
        row.update(tokens=report.tokens, device=report.device)
    return {
        **row,
        "health": Health.ALIVE.value,
        "self": True,
        "heard_s": 0.0,
        "claim": None,
        "claim_round": None,
    }


def _member(view: NodeView, member: Member, found: Comparison | None) -> dict[str, Any]:
    return {
        **_row(view, member.record.node_id, member.record.body),
        "health": member.health.value,
        "tokens_per_s": member.tokens_per_s,
        "self": False,
        "heard_s": round(max(0.0, time.monotonic() - member.heard), 1),
        "claim": found.likeness.value if found else None,
        "claim_round": found.round if found else None,
    }


def _row(view: NodeView, node_id: bytes, row: MemberRecordBody) -> dict[str, Any]:
    """The fields that are the same for ourselves and for others."""
    may_train = view.core.acl.role_of(node_id) is Role.TRAIN
    return {
        "id": node_id.hex(),
        "name": row.name,
        "trains": row.trains,
        "round": max(row.round, view.core.ledger.last_round(node_id)),
        "tokens": row.tokens,
        "tokens_per_s": row.tokens_per_s,
        "loss": row.loss or None,
        "device": row.device,
        "version": row.version,
        "addresses": list(row.addresses),
        "role": "train" if row.trains and may_train else "observe",
        "conduct": _conduct(view.merging.conduct.of(node_id)),
    }


def _conduct(found: Summary) -> dict[str, Any] | None:
    """What has been seen of a member's deltas; None if it has published none lately."""
    if not found.judged:
        return None
    return {
        "judged": found.judged,
        "void": found.void,
        "clipped": found.clipped,
        "mean_clip": found.clip_factor,
        "opposed": found.opposed,
        "agreement": found.agreement,
        "verdict": found.verdict,
    }


def _links(view: NodeView, watching: Watching) -> list[dict[str, Any]]:
    rows = []
    for link in view.links.values():
        sent, received = watching.rates.of(link.number)
        rows.append(
            {
                "id": link.node_id.hex(),
                "outbound": link.outbound,
                "sent": link.traffic.sent,
                "received": link.traffic.received,
                "payload_sent": link.traffic.payload_sent,
                "payload_received": link.traffic.payload_received,
                "sent_per_s": round(sent, 1),
                "received_per_s": round(received, 1),
                "dropped": link.dropped,
            }
        )
    return rows


# --- What clients that watch a node are told: its state and its rounds, when asked and as they change.

HEARTBEAT_TICKS = 15

TOLD_ROUNDS_MAX = 512
TOLD_ENTRIES_MAX = 32_768
"""Limits of one answer: 512 rounds of 64 members, about 1 MB of JSON. A page asks again for older ones."""


class Bulletin:
    """Serialises news once for all listeners, and answers to questions no more often than needed."""

    def __init__(self, view: NodeView, watching: Watching) -> None:
        self._view = view
        self._watching = watching
        self.feed = Feed()
        self._noticed = 0
        self._state: tuple[float, bytes] | None = None
        self._telling = asyncio.Lock()
        """A full answer takes 0.2 s to serialise, so only one is serialised at a time."""

    def publish(self, ticks: int) -> None:
        """Tell the listeners what is new. Called after every look of `Watching`."""
        changed = self._watching.chronicle.take_changed()
        notices = self._watching.notices.since(self._noticed)
        self._noticed = notices[-1].number if notices else self._noticed
        if not len(self.feed):
            return
        events = [event("notice", notice.to_json()) for notice in notices]
        if changed:
            events.append(event("rounds", as_json(changed, self._view.core.layout)))
        events.append(event_of("state", self.state()))
        if ticks % HEARTBEAT_TICKS == 0:
            events.append(HEARTBEAT)
        self.feed.publish(events)

    def opening(self) -> list[bytes]:
        """What a new listener is told first."""
        notices = [notice for notice in self._watching.notices.since(0) if notice.number <= self._noticed]
        return [
            event_of("state", self.state()),
            event("evaluations", self._watching.evaluations.to_json()),
            *(event("notice", notice.to_json()) for notice in notices),
        ]

    def state(self) -> bytes:
        """The state as JSON, at most half a tick old, however many ask."""
        now = time.monotonic()
        if self._state is None or now - self._state[0] > TICK_S / 2:
            self._state = (now, to_json(admin_state(self._view, self._watching)))
        return self._state[1]

    async def rounds(self, first: int, last: int) -> bytes:
        """The newest rounds kept from `first` to `last`, and the number of the oldest kept of all, as JSON.

        Rounds that are no longer in memory come from disk. Done in a thread, since they may be many.
        """
        self._watching.settle()
        chronicle = self._watching.chronicle
        async with self._telling:
            kept = list(at_most(chronicle.newest_first(first, last), TOLD_ROUNDS_MAX, TOLD_ENTRIES_MAX))
            return await asyncio.to_thread(
                self._told, kept, chronicle.oldest(), first, min(last, chronicle.begins_after)
            )

    def _told(self, newest: list[Round], oldest: int | None, first: int, stored_last: int) -> bytes:
        store = self._watching.store
        rounds_left = TOLD_ROUNDS_MAX - len(newest)
        entries_left = TOLD_ENTRIES_MAX - sum(len(row.entries) for row in newest)
        if first <= stored_last and rounds_left > 0 and entries_left > 0:
            newest = [*newest, *store.between(first, stored_last, rounds_left, entries_left)]
        begins = [number for number in (oldest, store.oldest()) if number is not None]
        return self._serialised(newest[::-1], min(begins, default=None))

    def _serialised(self, rounds: list[Round], oldest: int | None) -> bytes:
        """Rounds as JSON, serialised line by line, with no line's objects kept. A single call for all of them
        would hold the interpreter lock, which the event loop needs too, and so would the garbage collection
        of everything made for it.
        """
        layout, places = self._view.core.layout, dict[bytes, int]()
        lines = b",".join([to_json(line_of(row, layout, places)) for row in rounds])
        authors = to_json([author.hex() for author in places])
        return b'{"oldest":%b,"authors":%b,"rounds":[%b]}' % (to_json(oldest), authors, lines)
