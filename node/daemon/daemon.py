"""The daemon: the process that carries out what the protocol core decides.

Theory of operation
-------------------

A node is two processes. The trainer computes (`node/trainer`, with torch); the daemon does everything else,
and never imports torch. `gossamer.protocol.Replica`, the core, makes every decision: which records are valid,
whom to tell of them, what to fetch from whom, when to merge a round, when to write a snapshot, when to start
again from another one. The core does no I/O and reads no clock. This module is its adapter::

    bytes from links, chunks, the trainer, the clock
        |                                                  files, sockets, threads
        v                                                           ^
    Event --> dispatch() --> Replica.handle(event, now) --> [Effect, ...] --> carry_out()

`dispatch` is the only way in: it gives the core one event, carries out the effects that come back, in order,
and arms the one timer anew. `carry_out` is the only way out: one `match`, a line or two for each kind of
effect. Neither ever waits. What takes time is queued for one of the tasks that last as long as the node
(`_lasting`), or becomes a short task of its own (`spawn`), whose number the core bounds. Whatever comes of it
is again an event.

All of this runs on one thread, so no two events are ever handled at a time, and nothing here needs a lock.
Work of more than a few milliseconds (SQLite, files, merging, hashing a snapshot) goes to worker threads.

Four promises are kept here and not in the core:

* *Write before you speak.* `Store(own=True)` becomes a durable row; only then `Stored` goes back to the core,
  which tells nobody of the record before. A crash in between loses a delta that nobody has seen; it
  never makes us sign another one for the same round.
* *Restored before reached.* All that the folder holds is given back to the core before the first socket
  listens. A trainer may hand in its last delta again: if we did not know it, we would sign its round twice.
* *The trainer never waits.* It hears how far the swarm is (`Clock`) when that changes, and always before it
  is offered what depends on it. What it hands in is kept even if it dies at once.
* *A stop takes five seconds at most*, or as long as the owner gives it. The trainer hands in its open
  windows, peers get our last deltas, what is queued goes out; whatever is not done by then is cancelled.
  Every task ends, and no file is left half written.

A fault of a peer costs that peer its link. A fault of the disk makes its writers wait (`storage/disk.py`).
Any other error ends the daemon with one line, and the supervisor starts it again: that is cheaper, and more
often right, than to go on in a state that nobody has foreseen.

`build.py` makes all the parts. The supervisor (or `Peer.attach`) starts this module as ``python -m
gossamer.node.daemon.daemon OPTIONS``, with one JSON argument (see `NodeOptions`).
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from gossamer.node import logs, processes
from gossamer.node.address import WILDCARDS, format_address, parse_address, port_of
from gossamer.node.daemon.build import Edges, build
from gossamer.node.daemon.network.sockets import ask_for_open_files
from gossamer.node.ipc import messages as control
from gossamer.node.options import NodeOptions
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.errors import DiskFullError, FolderGoneError, LocalError, StorageError
from gossamer.protocol.identity import short
from gossamer.protocol.merge.contributions import RoundFigures
from gossamer.protocol.messages import Want
from gossamer.protocol.replica import BEFORE_ALL_ROUNDS
from gossamer.protocol.sampling import EVERY_ROUND

STOP_GRACE_S = 2.5
"""Time for the trainer to hand in its open windows, and for a peer to fetch them, when the node stops, unless
`--stop-within` gives more."""

FAREWELL_S = 0.5
"""Time after that to send what is queued for the peers."""

STOP_POLL_S = 0.05
"""How often to look whether our last delta has spread: the core is plain data and cannot be awaited."""

CLOCK_MOVED_S = 2.0
"""Smaller changes of the system clock are ignored: time servers correct it gradually."""

log = logging.getLogger("gossamer.node")


class Daemon:
    """One node's daemon, from start to stop. It is also its trainer port's `Attendant`."""

    def __init__(self, options: NodeOptions) -> None:
        """Take the folder and put the parts together. Raises ConfigError or StorageError."""
        self.options = options
        self._stopping = asyncio.Event()
        self._has_left = False
        self._rearm = asyncio.Event()
        self._unix_offset_s = unix_offset_s()
        self._pace = 0, EVERY_ROUND, 0
        self._clock_sent: control.Clock | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._link_tasks: set[asyncio.Task[None]] = set()
        # `build` makes phi and the monitor, so they are looked up late.
        edges = Edges(
            dispatch=self.dispatch,
            carry_out=self.carry_out,
            spawn=self.spawn,
            damaged=lambda blob: self.phi.archive.damaged(blob),  # noqa: PLW0108
            merged=self._merged,
            before_offer=self.tell_clock,
            status=lambda query: self.monitor.answer(query),  # noqa: PLW0108
            stopping=self._stopping,
        )
        self.store, self.core, self.network, self.phi, self.monitor, self.admin = build(
            options, edges, self._unix_offset_s
        )

    # -- life

    async def run(self) -> None:
        """Serve until `stop`, then take leave. Raises LocalError if it cannot start or must not go on."""
        host, port = parse_address(self.options.listen, port_min=0)
        loop = asyncio.get_running_loop()
        for number in processes.stop_signals():
            loop.add_signal_handler(number, self.stop)
        admin, server = self.admin, self.network.server
        try:
            await self._restore()
            before = self.store.home.read_last_daemon()
            admin_address = await admin.start(last=port_of(before.get("admin")))
            bound = await server.start(host, port, last=port_of(before.get("address")))
            if self.options.check:
                return
            self.network.dialler.start(server.bound_to)
            await self._serve(host, bound, admin_address)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._has_left = True
            await server.stop()
            await self.network.dialler.stop()
            await self.monitor.close()
            await admin.stop()
            self.store.records.close()
        self.network.access.check_expelled()

    def stop(self) -> None:
        """Begin an orderly stop."""
        self._stopping.set()

    async def _restore(self) -> None:
        """Take up what the folder holds, before anything can talk to us."""
        invitation = self.store.home.invitation()
        effects = await self.phi.archive.restore([invitation.grant.data] if invitation else [])
        self.phi.publisher.acknowledged = self.core.own_last
        self.network.access.check_own()
        await self.network.access.keep_own()
        await self.monitor.restore()
        self.carry_out(effects)

    async def _serve(self, host: str, port: int, admin: str | None) -> None:
        """Do all that a node does, until `stop`, and take leave."""
        access = self.network.access
        async with asyncio.TaskGroup() as self._tasks:
            lasting = [self._tasks.create_task(work, name=name) for name, work in self._lasting().items()]
            try:
                self._begin(host, port, admin)
                await self._stopping.wait()
                until = time.monotonic() + self._stop_grace_s + FAREWELL_S
                if access.expelled is None:
                    await self._take_leave()
                # Otherwise the next start would not know these credentials.
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, until - time.monotonic())):
                        await self.store.writer.drained()
                self.network.server.close()  # nothing would answer new connections from here on
            finally:
                self._has_left = True  # also if a task has failed: the group takes no new tasks then
            for task in [*lasting, *self._link_tasks]:
                task.cancel()

    def _lasting(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What is done as long as the node runs, by the names of the tasks."""
        store, network, phi = self.store, self.network, self.phi
        return {
            "timer": self._keep_time(),
            "disk": store.disk.run(),
            "records": store.writer.run(),
            "merging": phi.loop.run(),
            "archive": phi.archive.run(),
            "trainer": phi.port.serve(self),
            "publisher": phi.publisher.run(),
            "address_book": network.address_book.run(),
            "monitor": self.monitor.run(),
            "feed": self.admin.feed.run(),
        }

    def _begin(self, host: str, port: int, admin: str | None) -> None:
        """Note the listening address in the core and in the folder, and log how the node starts."""
        core, server = self.core, self.network.server
        local = format_address("127.0.0.1" if host in WILDCARDS else host, port)
        advertised = self.options.advertise or (() if host in WILDCARDS else (local,))
        self.network.own_addresses.listening(port, advertised, server.families)
        try:
            self.store.home.write_daemon(
                address=local,
                node_id=core.identity.node_id.hex(),
                plaintext=self.options.plaintext,
                trains=core.info.trains,
                admin=admin,
            )
        except StorageError as error:  # a full disk is no reason not to start
            log.warning("%s: other commands can find this node only by its address, not by its folder", error)
        swarm = core.swarm_id.hex()[:12]
        log.info("node %s of swarm %s listens on %s", short(core.identity.node_id), swarm, local)
        if core.ledger:
            log.info("resumed with %d records, own round %d", len(core.ledger), core.own_last)

    async def _take_leave(self) -> None:
        """Let the trainer hand in its open window, tell the peers, and send what is queued."""
        links = self.network.links
        self.phi.port.send(control.Stop())
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await self.phi.port.done.wait()
                await self.phi.publisher.drained()
                await self.store.writer.drained()
                while links and not self.core.own_are_spread:  # noqa: ASYNC110
                    await asyncio.sleep(STOP_POLL_S)
        except TimeoutError:
            log.warning("stopping before all of our last deltas were passed on to another node")
        self.network.address_book.remember()
        self.dispatch(ev.Leave())
        self._has_left = True
        for link in links.values():
            link.close_soon()
        if self._link_tasks:
            await asyncio.wait(self._link_tasks, timeout=FAREWELL_S)

    @property
    def _stop_grace_s(self) -> float:
        return STOP_GRACE_S + self.options.extra_stop_s

    # -- the core: events in, effects out

    def dispatch(self, event: ev.Event) -> list[fx.Effect]:
        """Give the core an event and carry out the effects that it returns.

        Events after we have left are dropped: nothing is running that could store them or answer.
        """
        if self._has_left:
            return []
        self._check_clock()
        effects = self.core.handle(event, time.monotonic())
        self.carry_out(effects)
        self._rearm.set()
        return effects

    def carry_out(self, effects: Iterable[fx.Effect]) -> None:
        """Do what the core asks for."""
        store, network = self.store, self.network
        for effect in effects:
            match effect:
                case fx.Send(message=Want() as want) if not store.disk.is_writable:
                    if effect.link in network.links:
                        self.spawn(network.transfers.ask(network.links[effect.link], want))
                case fx.Send():
                    network.links.send(effect.link, effect.message)
                case fx.Store():
                    self.monitor.heard(effect.delta)
                    self.phi.data.changed(effect.delta.round)
                    (self.phi.publisher.signed if effect.own else store.writer.add)(effect.delta)
                case fx.StoreCredential():
                    network.access.keep(effect)
                case fx.Expelled():
                    network.access.expelled = effect.reason
                    self.stop()
                case fx.Merge():
                    self.phi.loop.merge(effect)
                case fx.Get() | fx.Put() | fx.Keep() | fx.Blame() if effect.link not in network.links:
                    pass  # it has just ended
                case fx.Get():
                    self.spawn(network.transfers.get(network.links[effect.link], effect))
                case fx.Put():
                    self.spawn(network.transfers.put(network.links[effect.link], effect.blob))
                case fx.Keep():
                    self.spawn(network.transfers.keep(network.links[effect.link], effect))
                case fx.Dial():
                    self.spawn(network.dialler.dial(effect))
                case fx.Hangup():
                    network.links.hang_up(effect.link, effect.reason)
                case fx.Fetched() | fx.Seal() | fx.Close() | fx.Adopt() | fx.Prefetch():
                    self.phi.archive.carry_out(effect)
                case fx.Blame():
                    network.links.blame(network.links[effect.link].node_id, effect.reason, effect.offence)
                case fx.Notice() if effect.culprit:
                    network.scores.complain(effect.culprit, effect.text)
                case fx.Notice():
                    log.info("%s", effect.text)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a short-lived task of a link or transfer; the core bounds how many there are."""
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._link_tasks.add(task)
        task.add_done_callback(self._link_tasks.discard)
        return task

    async def _keep_time(self) -> None:
        """Wake the core whenever it asked to be woken, until cancelled.

        Many events may be handled before it runs again; the trainer hears of the clock once.
        """
        loop = asyncio.get_running_loop()  # its time is the monotonic clock
        while True:
            self._rearm.clear()
            self.tell_clock()
            timer = loop.call_at(self.core.next_wake(), self._rearm.set)
            await self._rearm.wait()
            timer.cancel()
            if time.monotonic() >= self.core.next_wake():
                self.dispatch(ev.Wake())

    def _check_clock(self) -> None:
        """Notice a system clock that was set, or a sleep, in which only the system clock goes on."""
        moved_s = unix_offset_s() - self._unix_offset_s
        if abs(moved_s) > CLOCK_MOVED_S:
            log.info("this machine's clock has moved by %.0f s", moved_s)
            self._unix_offset_s += moved_s
            self.network.links.forget_clocks()
            self.dispatch(ev.TimeSet(self._unix_offset_s))

    def _merged(self, merge: fx.Merge, found: RoundFigures | None, has_changed: bool) -> None:
        """A round has been merged."""
        if has_changed:
            self.phi.archive.note_merged(merge.round)
            self.phi.data.changed(merge.round)
        self.monitor.merged(merge.round, merge.deltas, found)
        loop = self.phi.loop
        (window, turn, _), (window_before, turn_before, _) = loop.pace, self._pace
        if window != window_before and window_before:
            log.info("windows have %d steps %s", window, loop.window_why)
        if turn != turn_before:
            log.info("each member contributes to one round in %.1f", turn / EVERY_ROUND)
        if loop.pace != self._pace:
            self._pace = loop.pace
            self.dispatch(ev.Paced(*self._pace))

    # -- the trainer

    def welcome(self) -> control.Welcome:
        """The first message to a new trainer; a `Clock` follows it."""
        self._clock_sent = None
        self.phi.loop.offer_all()
        core, publisher = self.core, self.phi.publisher
        return control.Welcome(
            core.identity.node_id,
            max(core.own_last, publisher.handed_in),
            self._clock,
            publisher.handed_in,
            publisher.acknowledged,
        )

    def publish(self, message: control.Publish, payload: memoryview) -> None:
        """Have a delta stored and signed."""
        self.phi.publisher.hand_in(message, payload)

    def trainer_changed(self) -> None:
        """The trainer reported, took a fragment, came or went: tell the core, and let merging go on."""
        report = self.phi.port.report
        if report is not None:
            self.dispatch(
                ev.Progress(
                    report.inner_steps, report.tokens, report.tokens_per_s, report.loss, report.device
                )
            )
        self.phi.loop.look()
        self.tell_clock()

    def tell_clock(self) -> None:
        """Tell the trainer how far the swarm is, if that has changed."""
        loop = self.phi.loop
        if not self.phi.port.attached:
            return
        # At least one round is unmerged while most others are at rounds that we refuse.
        unmerged = max(loop.unmerged, int(self.core.is_contradicted))
        links = len(self.network.links)
        codec = self.core.codec.name
        clock = control.Clock(self._clock, loop.tokens, links, unmerged, codec, *loop.pace[:2])
        if clock != self._clock_sent:
            self._clock_sent = clock
            self.phi.port.send(clock)
        self.phi.data.tell()

    @property
    def _clock(self) -> int:
        """The clock to publish by. For a diverged model, which nobody can train, there is none."""
        return BEFORE_ALL_ROUNDS if self.phi.loop.diverged else self.core.clock_to_publish_by


def unix_offset_s() -> float:
    """Unix time minus the monotonic clock, in seconds."""
    return time.time() - time.monotonic()


def _first(error: BaseException) -> BaseException:
    """The first error of a task group, however deeply nested."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    """Run a daemon from its one JSON argument; exit status 2 for a mistake that a person has to fix."""
    options = NodeOptions.model_validate_json(sys.argv[1])
    logs.configure(level=options.log_level, debug=options.debug, as_json=options.log_json)
    processes.reset_signals()
    os.umask(0o077)  # SQLite creates files itself
    try:
        ask_for_open_files()
        daemon = Daemon(options)
        processes.watch(lambda: signal.raise_signal(signal.SIGTERM))
        asyncio.run(daemon.run())
    except LocalError as error:
        log.error("%s", error, exc_info=error if options.debug else None)
        waits = isinstance(error, DiskFullError | FolderGoneError)  # as while a node runs
        return processes.FAILED if waits else processes.USER_ERROR
    return processes.DONE


if __name__ == "__main__":
    sys.exit(main())
