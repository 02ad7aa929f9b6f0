"""The daemon: one process that carries out what the protocol core decides. The composition root.

It owns the folder, the network, the stores and Phi; it has no opinion on validity, and does not import
torch. Started by the supervisor (or by `Peer.attach`) as ``python -m gossamer.node.daemon FOLDER ...``.
"""

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from gossamer.node import __version__, lifeline, logs
from gossamer.node.address import WILDCARDS, format_address, parse_address, parse_contact, port_of
from gossamer.node.dashboard.admin import TOKEN_VARIABLE, AdminServer
from gossamer.node.ipc import control
from gossamer.node.ipc.briefing import Briefing
from gossamer.node.ipc.publisher import Publisher
from gossamer.node.ipc.trainer_port import TrainerPort
from gossamer.node.monitoring.status import describe
from gossamer.node.network.acquaintances import Acquaintances, whom_to_join
from gossamer.node.network.admitting import Admitting
from gossamer.node.network.door import ask_for_open_files
from gossamer.node.network.open_links import OpenLinks
from gossamer.node.network.policing import Policing
from gossamer.node.network.questions import Questions
from gossamer.node.network.tls import Certificate
from gossamer.node.network.transfers import Transfers
from gossamer.node.network.transport import Transport
from gossamer.node.network.uploads import Uploads
from gossamer.node.options import DaemonOptions
from gossamer.node.phi.archive import Archive
from gossamer.node.phi.merging import Merging
from gossamer.node.phi.snapshots import SnapshotShelf
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.node.storage.home import Home, remove_unfinished
from gossamer.node.storage.recordstore import RecordStore
from gossamer.node.storage.recordwriter import RecordWriter
from gossamer.node.watching import Watching
from gossamer.protocol import effects as fx
from gossamer.protocol.chunks import payload_chunk_sizes
from gossamer.protocol.errors import ConfigError, LocalError
from gossamer.protocol.identity import short
from gossamer.protocol.presence import NodeInfo
from gossamer.protocol.replica import Replica

STOP_GRACE_S = 2.5
"""Time for the trainer to hand in its open window, and for a peer to fetch it, when the node stops."""

STOP_POLL_S = 0.05
"""The core is plain data: whether our last delta has spread is looked at, not awaited."""


CLOCK_MOVED_S = 2.0
"""What time servers correct by and by is none of our business."""

log = logging.getLogger("gossamer.node")


class Daemon:
    """One node's daemon, from start to stop."""

    def __init__(self, options: DaemonOptions) -> None:
        self.options = options
        self.home = Home(options.folder)
        self.home.create()
        self.home.lock()
        remove_unfinished(options.folder.glob(".*-*"))
        manifest = self.home.manifest()
        if manifest is None:
            raise ConfigError(f"no manifest in {options.folder}; run: gossamer node --join ADDRESS")
        self.manifest = manifest
        self.identity = self.home.identity()
        self.chunks = ChunkStore(self.home.chunks_path)
        self.records = RecordStore(self.home.ledger_path, manifest.swarm_id)
        contacts = whom_to_join(options.join, self.home)
        told = {parse_contact(text).address for text in options.join}
        certificate = None if options.plaintext else Certificate.of(self.home.tls_path)
        fingerprint = certificate.fingerprint if certificate else b""
        self.core = Replica(
            identity=self.identity,
            manifest=manifest,
            info=NodeInfo(
                name=options.name,
                trains=options.trains,
                incarnation=self.home.next_incarnation(),
                bootstrap=tuple(contact.address for contact in contacts),
                pins={contact.address: contact.node_id for contact in contacts if contact.node_id},
                remembered=frozenset(contact.address for contact in contacts) - told,
                trusted=frozenset(map(bytes.fromhex, options.trust)),
                fingerprint=fingerprint,
                version=__version__,
            ),
            has_chunk=self.chunks.__contains__,
            unix_offset_s=_unix_offset_s(),
            rng=random.Random(),
        )
        self.admitting = Admitting(self.core, self.records, self.dispatch, self.spawn)
        self.links = OpenLinks(self)
        self.policing = Policing(self.links.turn_away)
        questions = Questions(
            self.identity,
            manifest.swarm_id,
            fingerprint,
            manifest.canonical(),
            self.admitting,
            self.status,
        )
        self.transport = Transport(
            self.identity,
            manifest.swarm_id,
            self.links,
            self.admitting,
            questions,
            certificate,
            policing=self.policing,
            uploads=Uploads(self.chunks),
        )
        self.briefing = Briefing(self)
        self.publisher = Publisher(self.chunks, self.dispatch, self.briefing.acknowledge)
        self.port = TrainerPort(
            self.home.socket_path(),
            manifest,
            self.identity.node_id,
            on_attach=self.briefing.welcome,
            on_publish=self.publisher.publish,
            on_change=self.briefing.trainer_changed,
        )
        self.merging = Merging(self.core, self.port, self._refetch)
        self.shelf = SnapshotShelf(self.chunks, self.core.layout.snapshot_bytes)
        self.archive = Archive(self.core, self.merging, self.chunks, self.records, self.shelf, self.dispatch)
        self.acquaintances = Acquaintances(self.home, self.core)
        self.writer = RecordWriter(self.records, self.briefing.own_stored)
        self.transfers = Transfers(
            self.chunks,
            self.transport,
            self.dispatch,
            self._refetch,
            self.policing.blame,
            self.transport.uploads,
        )
        self.started = time.monotonic()
        self._tasks: asyncio.TaskGroup | None = None
        self._link_tasks: set[asyncio.Task[None]] = set()
        self._timer_moved = asyncio.Event()
        self._unix_offset_s = _unix_offset_s()
        self._stopping = asyncio.Event()
        self.watching = Watching(self)
        self.admin = AdminServer(self, options.admin, os.environ.get(TOKEN_VARIABLE, ""))

    # -- life

    async def run(self) -> None:
        """Serve until `stop`, then take leave. Raises LocalError if it cannot start or must not go on."""
        host, port = parse_address(self.options.listen, port_min=0)
        loop = asyncio.get_running_loop()
        for number in lifeline.stop_signals():
            loop.add_signal_handler(number, self.stop)
        try:
            # Before anyone can speak to us: a trainer that hands its last delta over again would have us
            # sign that round a second time, did we not know of it, and so equivocate.
            invitation = self.home.invitation()
            effects = await self.archive.restore([invitation.grant.data] if invitation else [])
            self.admitting.check_own()
            await self.watching.restore()
            self.carry_out(effects)
            before = self.home.read_daemon() or {}
            bound = await self.transport.start(host, port, last=port_of(before.get("address")))
            admin = await self.admin.start(last=port_of(before.get("admin")))
            async with asyncio.TaskGroup() as self._tasks:
                lasting = [
                    self._tasks.create_task(work, name=name)
                    for name, work in (
                        ("timer", self._keep_time()),
                        ("records", self.writer.run()),
                        ("merging", self.merging.run()),
                        ("archive", self.archive.run()),
                        ("trainer", self.port.serve()),
                        ("acquaintances", self.acquaintances.run()),
                        ("policing", self.policing.run()),
                        ("watching", self.watching.run()),
                        ("invitation", self.admitting.renewed()),
                    )
                ]
                self._begin(host, bound, admin)
                await self._stopping.wait()
                if self.admitting.is_expelled:
                    await self.admitting.kept_all(STOP_GRACE_S)  # or the next start would not know of it
                else:
                    await self._take_leave()
                for task in [*lasting, *self._link_tasks]:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            await self.watching.close()
            await self.admin.stop()
            await self.transport.stop()
            self.merging.close()
            self.records.close()
        self.admitting.check_expelled()

    def stop(self) -> None:
        """Begin an orderly stop."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def _begin(self, host: str, port: int, admin: str | None) -> None:
        """Make ourselves known."""
        advertised = self.options.advertise or (
            (format_address(host, port),) if host not in WILDCARDS else ()
        )
        self.carry_out(self.acquaintances.listening(port, advertised))
        local = format_address("127.0.0.1" if host in WILDCARDS else host, port)
        self.home.write_daemon(
            address=local,
            node_id=self.identity.node_id.hex(),
            plaintext=self.options.plaintext,
            admin=admin,
        )
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
                await self.writer.drained()
                while self.links and not self.core.own_last_spread:  # noqa: ASYNC110
                    await asyncio.sleep(STOP_POLL_S)
        except TimeoutError:
            log.warning("stopping before our last delta was handed on")
        self.acquaintances.remember()
        self.dispatch(fx.Leave())
        for link in self.links.values():
            link.close_soon()
        if self._link_tasks:
            await asyncio.wait(self._link_tasks, timeout=0.5)

    # -- the core

    def dispatch(self, event: fx.Event) -> list[fx.Effect]:
        """Give the core an event and carry out what it answers."""
        effects = self.core.handle(event, time.monotonic())
        self.carry_out(effects)
        self._timer_moved.set()
        self.briefing.tell_clock()
        return effects

    async def _keep_time(self) -> None:
        while True:
            delay = self.core.next_wake() - time.monotonic()
            if delay <= 0:
                self._look_at_the_time()
                self.dispatch(fx.Wake())
                continue
            self._timer_moved.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._timer_moved.wait()
            except TimeoutError:
                pass

    def _look_at_the_time(self) -> None:
        """Tell the core of a clock that was set, and of a sleep, in which only the one for people goes on."""
        offset_s = _unix_offset_s()
        if abs(offset_s - self._unix_offset_s) > CLOCK_MOVED_S:
            log.info("this machine's clock has moved by %.0f s", offset_s - self._unix_offset_s)
            self._unix_offset_s = offset_s
            self.dispatch(fx.TimeSet(offset_s))

    def carry_out(self, effects: Iterable[fx.Effect]) -> None:
        """Do what the core asks for."""
        for effect in effects:
            match effect:
                case fx.Send():
                    self.links.send(effect.link, effect.message)
                case fx.Store():
                    self.writer.add(effect.delta, own=effect.own)
                    if not effect.own:  # ours, once it is stored: until then it counts nowhere
                        self.watching.heard(effect.delta)
                case fx.StoreCredential():
                    self.admitting.keep(effect)
                case fx.Expelled():
                    self.admitting.expelled(effect.reason)
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
                    self.spawn(self.links.dial(effect))
                case fx.Hangup():
                    self.links.hang_up(effect.link, effect.reason)
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
                        self.policing.blame(node_id, effect.reason, effect.offence)
                case fx.Notice():
                    log.info("%s", effect.text)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a short-lived task of a link or transfer; the core bounds how many there are."""
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._link_tasks.add(task)
        task.add_done_callback(self._link_tasks.discard)
        return task

    def _refetch(self, blob: bytes) -> None:
        """A chunk on disk turned out damaged: fetch it again."""
        log.warning("chunk %s was damaged on disk; fetching it again", short(blob))
        for delta in self.core.ledger:
            if blob in delta.body.chunks:
                sizes = payload_chunk_sizes(delta.body.payload_bytes)
                self.dispatch(fx.Need(delta.record_id, tuple(zip(delta.body.chunks, sizes, strict=True))))

    # -- what others see

    async def status(self, query: dict[str, str]) -> dict[str, Any]:
        digests = await self.merging.digest() if query.get("digest") else None
        status = describe(self, digests)
        up_to = query.get("up_to", "")
        if up_to.isdecimal() and len(up_to) <= 10:
            prefix = await self.merging.prefix_digest(int(up_to))
            status["prefix"] = {"up_to": int(up_to), "digest": prefix.hex() if prefix else None}
        return status


def _unix_offset_s() -> float:
    """Unix time less the monotonic clock, seconds."""
    return time.time() - time.monotonic()


def _first(error: BaseException) -> BaseException:
    """The first error of a task group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    """Run a daemon from its one JSON argument; exit status 2 for a mistake that a person can mend."""
    options = DaemonOptions.from_json(sys.argv[1])
    logs.configure(level=options.log_level, debug=options.debug, as_json=options.log_json)
    os.umask(0o077)  # SQLite makes files of its own
    ask_for_open_files()
    try:
        daemon = Daemon(options)
        lifeline.watch(lambda: signal.raise_signal(signal.SIGTERM))
        asyncio.run(daemon.run())
    except LocalError as error:
        log.error("%s", error, exc_info=error if options.debug else None)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
