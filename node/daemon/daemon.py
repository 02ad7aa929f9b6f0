"""The daemon: one process that carries out what the protocol core decides. This is its composition root.

It owns the folder, the network, the stores and Phi. It has no opinion on validity, and does not import torch.
The supervisor (or `Peer.attach`) starts it as ``python -m gossamer.node.daemon.daemon OPTIONS``, where
OPTIONS is
one JSON argument (see `NodeOptions`).
"""

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sized
from contextlib import suppress
from typing import Any

from gossamer.node import __version__, logs
from gossamer.node import processes as exit_status
from gossamer.node import processes as lifeline
from gossamer.node.address import WILDCARDS, format_address, parse_address, parse_contact, port_of
from gossamer.node.daemon.dashboard.server import AdminServer, token_here
from gossamer.node.daemon.dashboard.sse import Bulletin
from gossamer.node.daemon.monitoring.status import NodeView, status_of
from gossamer.node.daemon.monitoring.watching import Watching
from gossamer.node.daemon.network.access import Access
from gossamer.node.daemon.network.address_book import AddressBook, OwnAddresses, whom_to_join
from gossamer.node.daemon.network.chunk_transfer import ChunkRoutes, LocalChunks, Transfers
from gossamer.node.daemon.network.links import LinkTable
from gossamer.node.daemon.network.listening import NothingLeft, ask_for_open_files
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import Dialler, Reception, RpcServer, Server
from gossamer.node.daemon.network.tls import Certificate
from gossamer.node.daemon.network.upload_limits import UploadLimits
from gossamer.node.daemon.phi.archive import Archive
from gossamer.node.daemon.phi.loop import Merging
from gossamer.node.daemon.phi.snapshots import SnapshotShelf
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.storage.records import RecordStore, RecordWriter
from gossamer.node.daemon.trainer_port import Publisher, TrainerPort
from gossamer.node.home import Home
from gossamer.node.inputs import for_a_script
from gossamer.node.ipc import messages as control
from gossamer.node.options import NodeOptions
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.errors import DiskFullError, FolderGoneError, LocalError, StorageError
from gossamer.protocol.identity import short
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.member_records import NodeInfo
from gossamer.protocol.messages import Want
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import BEFORE_ALL_ROUNDS, Replica

# --- Wakes the core when it asked to be woken, and tells it when the system clock was set.

CLOCK_MOVED_S = 2.0
"""Smaller changes are ignored: time servers correct the clock gradually."""

log = logging.getLogger("gossamer.node")


def unix_offset_s() -> float:
    """Unix time minus the monotonic clock, in seconds."""
    return time.time() - time.monotonic()


class Timekeeper:
    """The core's timer."""

    def __init__(self, core: Replica, dispatch: Callable[[ev.Event], object]) -> None:
        self._core = core
        self._dispatch = dispatch
        self._unix_offset_s = unix_offset_s()
        self._moved = asyncio.Event()

    def look(self) -> None:
        """Look at the core's wake time again: it may have changed."""
        self._moved.set()

    async def run(self) -> None:
        """Keep time until cancelled."""
        while True:
            delay = self._core.next_wake() - time.monotonic()
            if delay <= 0:
                self._dispatch(ev.Wake())
                continue
            self._moved.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._moved.wait()
            except TimeoutError:
                pass

    def check_clock(self) -> bool:
        """Notice a system clock that was set, or a sleep, in which only the system clock goes on. To be
        called before any event that comes after it. Returns whether there was either."""
        offset_s = unix_offset_s()
        if abs(offset_s - self._unix_offset_s) <= CLOCK_MOVED_S:
            return False
        log.info("this machine's clock has moved by %.0f s", offset_s - self._unix_offset_s)
        self._unix_offset_s = offset_s
        self._dispatch(ev.TimeSet(offset_s))
        return True


# --- Keeps the trainer and the core informed of each other.


class Briefing:
    """The port's `Attendant`: carries what a daemon's core and its attached trainer tell each other."""

    def __init__(
        self,
        core: Replica,
        port: TrainerPort,
        merging: Merging,
        publisher: Publisher,
        links: Sized,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._core = core
        self._port = port
        self._merging = merging
        self._publisher = publisher
        self._links = links
        self._dispatch = dispatch
        self._clock_sent: tuple[int, int, int, int] | None = None

    def welcome(self) -> control.Welcome:
        """The first message to a new trainer; a `Clock` follows it."""
        self._clock_sent = None
        core, publisher = self._core, self._publisher
        return control.Welcome(
            core.identity.node_id,
            max(core.own_last, publisher.handed_in),
            self._clock,
            publisher.handed_in,
            publisher.acknowledged,
        )

    def publish(self, message: control.Publish, payload: memoryview) -> None:
        """Have a delta stored and signed."""
        self._publisher.hand_in(message, payload)

    def trainer_changed(self) -> None:
        """The trainer reported, took a fragment, came or went: tell the core, and let merging go on."""
        report = self._port.report
        if report is not None:
            self._dispatch(
                ev.Progress(
                    report.inner_steps, report.tokens, report.tokens_per_s, report.loss, report.device
                )
            )
        self._merging.look()
        self.tell_clock()

    def tell_clock(self) -> None:
        """Tell the trainer how far the swarm is, if that has changed."""
        if not self._port.attached:  # called after every event, and a joining node has many
            return
        told = (self._clock, self._merging.tokens, len(self._links), self._unmerged)
        if told != self._clock_sent:
            self._clock_sent = told
            self._port.send(control.Clock(*told))

    @property
    def _unmerged(self) -> int:
        """How many rounds are not in Phi yet; at least 1 while most others are at rounds that we refuse."""
        return max(self._merging.unmerged, int(self._core.is_contradicted))

    @property
    def _clock(self) -> int:
        """The clock to publish by. For a diverged model, which nobody can train, there is none."""
        return BEFORE_ALL_ROUNDS if self._merging.diverged else self._core.clock_to_publish_by


STOP_GRACE_S = 2.5
"""Time for the trainer to hand in its open window, and for a peer to fetch it, when the node stops."""

FAREWELL_S = 0.5
"""Time after that to send what is queued for the peers."""

STOP_POLL_S = 0.05
"""How often to look whether our last delta has spread: the core is plain data and cannot be awaited."""


class Daemon:
    """One node's daemon, from start to stop."""

    def __init__(self, options: NodeOptions) -> None:
        """Take the folder and put the parts together. Raises ConfigError or StorageError."""
        self.options = options
        self._stopping = asyncio.Event()
        self._has_left = False
        self._tasks: asyncio.TaskGroup | None = None
        self._link_tasks: set[asyncio.Task[None]] = set()

        # The node's folder.
        self.home, manifest = _opened(options)
        self.identity = self.home.identity()
        certificate = None if options.plaintext else Certificate.of(self.home.tls_path)
        fingerprint = certificate.fingerprint if certificate else b""
        self.chunks = ChunkStore(self.home.chunks_path)
        self.records = RecordStore(self.home.ledger_path, manifest.swarm_id)
        self.disk = Disk(self.home.root, self.home.chunks_path, on_closed=lambda: self.dispatch(ev.Paused()))
        self.writer = RecordWriter(self.records, self.disk, self._own_stored)

        # The core, which decides, and its timer.
        self.core = Replica(
            identity=self.identity,
            manifest=manifest,
            info=_info(options, self.home, fingerprint),
            fits=self.chunks.fits,
            unix_offset_s=unix_offset_s(),
            rng=random.Random(),
        )
        self.timekeeper = Timekeeper(self.core, self.dispatch)

        # Links with other nodes, and chunks over them.
        self.links = LinkTable()
        self.scores = PeerScores(self.links.turn_away)
        self.address_book = AddressBook(self.home, self.core)
        self.own_addresses = OwnAddresses(self.core, self.carry_out)
        self.access = Access(self.core, self.home, self.records, self.dispatch, self.spawn, self._stopping)
        shelf = SnapshotShelf(self.chunks, self.core.layout.snapshot_bytes)
        self.local_chunks = LocalChunks(self.chunks, self.disk, shelf, self.core, self.dispatch)
        uploads = UploadLimits(self.chunks)
        self.transfers = Transfers(self.local_chunks, uploads, self.scores, self.spawn)
        reception = Reception(
            self.links,
            self.transfers,
            self.own_addresses,
            self.scores,
            self.writer,
            self.dispatch,
            self._stopping,
        )
        questions = RpcServer(
            self.identity,
            manifest.swarm_id,
            fingerprint,
            manifest.canonical(),
            self.access,
            self._status,
        )
        self.server = Server(
            self.identity,
            manifest.swarm_id,
            reception,
            self.access,
            questions,
            ChunkRoutes(self.local_chunks, self.scores, uploads),
            certificate,
            self.scores,
        )
        self.dialler = Dialler(self.server, self.scores, self.core, self.dispatch)

        # Phi, and the trainer to which it is offered.
        self.port = TrainerPort(options.socket or self.home.socket_path(), manifest)
        self.merging = Merging(self.core, self.port, self.local_chunks.refetch)
        self.archive = Archive(
            self.core, self.merging, self.chunks, self.records, self.disk, shelf, self.dispatch
        )
        self.merging.on_merged = self.archive.note_merged
        self.local_chunks.on_snapshot_lost = self.archive.snapshot_lost
        self.publisher = Publisher(self.chunks, self.disk, self.dispatch, self.port.send)
        self.briefing = Briefing(
            self.core, self.port, self.merging, self.publisher, self.links, self.dispatch
        )
        self.merging.offering.before = self.briefing.tell_clock

        # Monitoring, and the admin server.
        self.view = NodeView(
            home=self.home,
            core=self.core,
            port=self.port,
            merging=self.merging,
            archive=self.archive,
            links=self.links,
            server=self.server,
            scores=self.scores,
            disk=self.disk,
            stopping=self._stopping,
        )
        self.watching = Watching(self.view)
        self.merging.on_judged = self.watching.merged
        self.bulletin = Bulletin(self.view, self.watching)
        self.watching.on_look = self.bulletin.publish
        self.admin = AdminServer(self.view, self.watching, self.bulletin, options.admin, token_here())

    # -- life

    async def run(self) -> None:
        """Serve until `stop`, then take leave. Raises LocalError if it cannot start or must not go on."""
        host, port = parse_address(self.options.listen, port_min=0)
        loop = asyncio.get_running_loop()
        for number in lifeline.stop_signals():
            loop.add_signal_handler(number, self.stop)
        try:
            await self._restore()
            before = self.home.read_last_daemon() or {}
            admin = await self.admin.start(last=port_of(before.get("admin")))
            bound = await self.server.start(host, port, last=port_of(before.get("address")))
            if self.options.check:
                return
            await self._serve(host, bound, admin)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._has_left = True
            self.bulletin.feed.close()
            await self.server.stop()
            await self.watching.close()
            await self.admin.stop()
            self.records.close()
        self.access.check_expelled()

    async def _restore(self) -> None:
        """Take up what the folder holds, before anything can talk to us.

        A trainer may hand in its last delta again: if we did not know that delta, we would sign its round a
        second time, which is equivocation.
        """
        invitation = self.home.invitation()
        effects = await self.archive.restore([invitation.grant.data] if invitation else [])
        self.publisher.acknowledged = self.core.own_last
        self.access.check_own()
        await self.access.keep_own()
        await self.watching.restore()
        self.carry_out(effects)

    async def _serve(self, host: str, port: int, admin: str | None) -> None:
        """Do all that a node does, until `stop`, and take leave."""
        async with asyncio.TaskGroup() as self._tasks:
            lasting = [self._tasks.create_task(work, name=name) for name, work in self._lasting().items()]
            try:
                self._begin(host, port, admin)
                await self._stopping.wait()
                until = time.monotonic() + STOP_GRACE_S + FAREWELL_S
                if not self.access.is_expelled:
                    await self._take_leave()
                # Otherwise the next start would not know these credentials.
                await self.access.kept_all(max(0.0, until - time.monotonic()))
                self.server.close()  # nothing would answer new connections from here on
            finally:
                self._has_left = True  # also if a task has failed: the group takes no new tasks then
            for task in [*lasting, *self._link_tasks]:
                task.cancel()

    def _lasting(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What is done as long as the node runs, by the names of the tasks."""
        return {
            "timer": self.timekeeper.run(),
            "records": self.writer.run(),
            "merging": self.merging.run(),
            "archive": self.archive.run(),
            "disk": self.disk.run(),
            "trainer": self.port.serve(self.briefing),
            "publisher": self.publisher.run(),
            "address_book": self.address_book.run(),
            "scores": self.scores.run(),
            "watching": self.watching.run(),
            "invitation": self.access.renewed(),
        }

    def stop(self) -> None:
        """Begin an orderly stop."""
        self._stopping.set()

    def _begin(self, host: str, port: int, admin: str | None) -> None:
        """Note the listening address in the core and in the folder, and log how the node starts."""
        advertised = self.options.advertise or (
            (format_address(host, port),) if host not in WILDCARDS else ()
        )
        assert self.server.door is not None
        self.own_addresses.listening(port, advertised, self.server.door.families)
        local = format_address("127.0.0.1" if host in WILDCARDS else host, port)
        try:
            self.home.write_daemon(
                address=local,
                node_id=self.identity.node_id.hex(),
                plaintext=self.options.plaintext,
                trains=self.core.info.trains,
                admin=admin,
            )
        except StorageError as error:  # a full disk is no reason not to start
            log.warning("%s: other commands can find this node only by its address, not by its folder", error)
        log.info("node %s of swarm %s listens on %s", short(self.identity.node_id), self._swarm, local)
        if self.core.ledger:
            log.info("resumed with %d records, own round %d", len(self.core.ledger), self.core.own_last)

    @property
    def _swarm(self) -> str:
        return self.core.swarm_id.hex()[:12]

    async def _take_leave(self) -> None:
        """Let the trainer hand in its open window, tell the peers, and send what is queued."""
        self.port.send(control.Stop())
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self.port.done.wait()
                await self.publisher.drained()
                await self.writer.drained()
                while self.links and not self.core.own_last_spread:  # noqa: ASYNC110
                    await asyncio.sleep(STOP_POLL_S)
        except TimeoutError:
            log.warning("stopping before our last delta was passed on to another node")
        self.address_book.remember()
        self.dispatch(ev.Leave())
        for link in self.links.values():
            link.close_soon()
        if self._link_tasks:
            await asyncio.wait(self._link_tasks, timeout=FAREWELL_S)

    # -- the core

    def dispatch(self, event: ev.Event) -> list[fx.Effect]:
        """Give the core an event and carry out the effects that it returns.

        Events after we have left are dropped: nothing is running that could store them or answer.
        """
        if self._has_left:
            return []
        if self.timekeeper.check_clock():
            self.links.forget_clocks()
        effects = self.core.handle(event, time.monotonic())
        self.carry_out(effects)
        self.timekeeper.look()
        self.briefing.tell_clock()
        return effects

    def carry_out(self, effects: Iterable[fx.Effect]) -> None:
        """Do what the core asks for."""
        for effect in effects:
            match effect:
                case fx.Send(message=Want() as question) if not self.disk.is_writable:
                    if effect.link in self.links:
                        self.spawn(self.transfers.ask(self.links[effect.link], question))
                case fx.Send():
                    self.links.send(effect.link, effect.message)
                case fx.Store():
                    self.writer.add(effect.delta, own=effect.own)
                    if not effect.own:  # our own is noted once stored: until then it counts nowhere
                        self.watching.heard(effect.delta)
                case fx.StoreCredential():
                    self.access.keep(effect)
                case fx.Expelled():
                    self.access.expelled(effect.reason)
                    self.stop()
                case fx.Ready():
                    self.merging.mark(effect.delta.round)
                case fx.Get():
                    if effect.link in self.links:
                        self.spawn(self.transfers.get(self.links[effect.link], effect))
                case fx.Put():
                    if effect.link in self.links:
                        self.transfers.asked(self.links[effect.link], effect.blob)
                case fx.Dial():
                    self.spawn(self.dialler.dial(effect))
                case fx.Hangup():
                    self.links.hang_up(effect.link, effect.reason)
                    self.transfers.end(effect.link)
                case fx.Fetched():
                    self.archive.chunk_here()
                case fx.Seal():
                    self.archive.seal(effect.round)
                case fx.Close():
                    self.archive.close(effect)
                case fx.Adopt():
                    self.archive.adopt(effect.claim)
                case fx.Prefetch():
                    self.archive.prefetch(effect.claim)
                case fx.Blame():
                    if effect.link in self.links:
                        node_id = self.links[effect.link].node_id
                        self.scores.blame(node_id, effect.reason, effect.offence)
                case fx.Notice() if effect.culprit:
                    self.scores.complain(effect.culprit, effect.text)
                case fx.Notice():
                    log.info("%s", effect.text)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a short-lived task of a link or transfer; the core bounds how many there are."""
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._link_tasks.add(task)
        task.add_done_callback(self._link_tasks.discard)
        return task

    def _own_stored(self, delta: Delta) -> None:
        """Our delta is durable: now the core may announce it, and the trainer may go on."""
        self.dispatch(ev.Stored(delta))
        self.watching.heard(delta)
        self.publisher.acknowledge(delta.round)

    async def _status(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The answer to other nodes that ask for our status."""
        return await status_of(self.view, query)


def _opened(options: NodeOptions) -> tuple[Home, Manifest]:
    """A node's folder, locked for as long as this process lives. Raises StorageError.

    A missing folder is not created: it has been moved, and a new one would be in the way when it comes back.
    """
    home = Home(options.root)
    manifest = home.own_manifest()
    home.lock.take()
    home.set_daemon_aside()
    with suppress(OSError):  # what a crash left may stay
        home.tidy()
    return home, manifest


def _info(options: NodeOptions, home: Home, fingerprint: bytes) -> NodeInfo:
    """What the core has to know about this node. Raises ConfigError for invalid contacts."""
    contacts = whom_to_join(options.join, home)
    told = {parse_contact(text).address for text in options.join}
    return NodeInfo(
        name=options.name,
        trains=not options.observe,
        incarnation=home.next_incarnation(),
        bootstrap=tuple(contact.address for contact in contacts),
        pins={contact.address: contact.node_id for contact in contacts if contact.node_id},
        remembered=frozenset(contact.address for contact in contacts) - told,
        trusted=frozenset(map(bytes.fromhex, options.trust)),
        fingerprint=fingerprint,
        version=__version__,
    )


def _first(error: BaseException) -> BaseException:
    """The first error of a task group, however deeply nested."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    """Run a daemon from its one JSON argument; exit status 2 for a mistake that a person has to fix."""
    options = NodeOptions.from_json(sys.argv[1])
    logs.configure(
        level=options.log_level,
        debug=options.debug,
        as_json=options.log_json,
        wording=for_a_script if options.is_of_a_script else str,
    )
    lifeline.reset_signals()
    os.umask(0o077)  # SQLite creates files itself
    ask_for_open_files()
    logging.getLogger("asyncio").addFilter(NothingLeft())
    try:
        daemon = Daemon(options)
        lifeline.watch(lambda: signal.raise_signal(signal.SIGTERM))
        asyncio.run(daemon.run())
    except LocalError as error:
        log.error("%s", error, exc_info=error if options.debug else None)
        waits = isinstance(error, DiskFullError | FolderGoneError)  # as while a node runs
        return exit_status.FAILED if waits else exit_status.USER_ERROR
    except MemoryError as error:
        log.error(
            "not enough memory: free some, or raise the limit", exc_info=error if options.debug else None
        )
        return exit_status.FAILED
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        log.error("the system cannot start more threads: free some, or raise the limit (ulimit -u)")
        return exit_status.FAILED
    return exit_status.DONE


if __name__ == "__main__":
    sys.exit(main())
