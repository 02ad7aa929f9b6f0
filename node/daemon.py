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

import aiohttp

from gossamer.node import __version__, control, lifeline, logs
from gossamer.node.acquaintances import Acquaintances, whom_to_join
from gossamer.node.address import WILDCARDS, format_address, parse_address
from gossamer.node.admin import TOKEN_VARIABLE, AdminServer
from gossamer.node.archive import Archive
from gossamer.node.chunkstore import ChunkStore
from gossamer.node.home import Home, remove_unfinished
from gossamer.node.link import PeerLink
from gossamer.node.merging import Merging
from gossamer.node.options import DaemonOptions
from gossamer.node.policing import Policing
from gossamer.node.publisher import Publisher
from gossamer.node.recordstore import RecordStore
from gossamer.node.recordwriter import RecordWriter
from gossamer.node.snapshots import SnapshotShelf
from gossamer.node.status import describe
from gossamer.node.tls import Certificate
from gossamer.node.trainer_port import TrainerPort
from gossamer.node.transfers import Transfers
from gossamer.node.transport import Transport
from gossamer.node.watching import Watching
from gossamer.protocol import effects as fx
from gossamer.protocol.admission import Role
from gossamer.protocol.chunks import chunk_sizes
from gossamer.protocol.errors import ConfigError, LocalError, PeerError, StorageError
from gossamer.protocol.identity import short
from gossamer.protocol.messages import Message, encode
from gossamer.protocol.presence import NodeInfo
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica

STOP_GRACE_S = 2.5
"""Time for the trainer to hand in its open window, and for a peer to fetch it, when the node stops."""

STOP_POLL_S = 0.05
"""The core is plain data: whether our last delta has spread is looked at, not awaited."""


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
        certificate = None if options.plaintext else Certificate.of(self.home.tls_path)
        self.core = Replica(
            identity=self.identity,
            manifest=manifest,
            info=NodeInfo(
                name=options.name,
                trains=options.trains,
                incarnation=self.home.next_incarnation(),
                bootstrap=tuple(contact.address for contact in contacts),
                pins={contact.address: contact.node_id for contact in contacts if contact.node_id},
                fingerprint=certificate.fingerprint if certificate else b"",
                version=__version__,
            ),
            has_chunk=self.chunks.__contains__,
            unix_offset_s=time.time() - time.monotonic(),
            rng=random.Random(),
        )
        self.policing = Policing(self._turn_away)
        self.transport = Transport(
            self.identity,
            manifest.swarm_id,
            manifest.canonical(),
            self,
            certificate,
            policing=self.policing,
        )
        self.publisher = Publisher(self.chunks, self.dispatch, self._acknowledge)
        self.port = TrainerPort(
            self.home.socket_path(),
            manifest,
            self.identity.node_id,
            on_attach=self._welcome,
            on_publish=self.publisher.publish,
            on_change=self._trainer_changed,
        )
        self.merging = Merging(self.core, self.port, self._refetch)
        self.shelf = SnapshotShelf(self.chunks, self.core.layout.snapshot_bytes)
        self.archive = Archive(self.core, self.merging, self.chunks, self.records, self.shelf, self.dispatch)
        self.acquaintances = Acquaintances(self.home, self.core)
        self.writer = RecordWriter(self.records, self._own_stored)
        self.transfers = Transfers(
            self.chunks, self.transport, self.dispatch, self._refetch, self.policing.blame
        )
        self.started = time.monotonic()
        self.links: dict[int, PeerLink] = {}
        self._expelled: str | None = None
        self._keeping: set[asyncio.Task[None]] = set()
        self._past_traffic = [0, 0, 0, 0]
        self._tasks: asyncio.TaskGroup | None = None
        self._link_tasks: set[asyncio.Task[None]] = set()
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._timer_moved = asyncio.Event()
        self._stopping = asyncio.Event()
        self._clock_sent: tuple[int, int, bool, int] | None = None
        self.watching = Watching(self)
        self.admin = AdminServer(self, options.admin, os.environ.get(TOKEN_VARIABLE, ""))
        self._encoded: tuple[Message, bytes] | None = None

    # -- life

    async def run(self) -> None:
        """Serve until `stop`, then take leave. Raises LocalError if it cannot start or must not go on."""
        host, port = parse_address(self.options.listen, port_min=0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            # Before anyone can speak to us: a trainer that hands its last delta over again would have us
            # sign that round a second time, did we not know of it, and so equivocate.
            invitation = self.home.invitation()
            effects = await self.archive.restore([invitation.grant.data] if invitation else [])
            self._check_admission()
            await self.watching.restore()
            self._carry_out(effects)
            bound = await self.transport.start(host, port)
            admin = await self.admin.start(last=(self.home.read_daemon() or {}).get("admin"))
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
                    )
                ]
                self._begin(host, bound, admin)
                await self._stopping.wait()
                if self._expelled is None:
                    await self._take_leave()
                elif self._keeping:  # or the next start would not know of it
                    await asyncio.wait(self._keeping, timeout=STOP_GRACE_S)
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
        if self._expelled is not None:
            because = f": {self._expelled}" if self._expelled else ""
            raise ConfigError(f"an owner of this swarm has revoked this node{because}")

    def _check_admission(self) -> None:
        """Nobody would let us in: better said now, and once. Raises ConfigError."""
        try:
            self.core.vetting.vet(self.identity.node_id, b"", time.monotonic())
        except PeerError as error:
            own = self.identity.node_id
            mend = "" if self.core.charter.revocation_of(own) else "; start it with --invite INVITATION"
            raise ConfigError(f"{error}{mend}") from None
        if self.core.info.trains and self.core.charter.role_of(self.identity.node_id) is not Role.TRAIN:
            raise ConfigError("this node was invited to observe, not to train; start it with --observe")

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
        self._carry_out(self.acquaintances.listening(port, advertised))
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
        self._carry_out(effects)
        self._timer_moved.set()
        self._tell_clock()
        return effects

    async def _keep_time(self) -> None:
        while True:
            delay = self.core.next_wake() - time.monotonic()
            if delay <= 0:
                self.dispatch(fx.Wake())
                continue
            self._timer_moved.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._timer_moved.wait()
            except TimeoutError:
                pass

    def _carry_out(self, effects: Iterable[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send():
                    if effect.link in self.links:
                        self.links[effect.link].send(self._encode(effect.message))
                case fx.Store():
                    self.writer.add(effect.delta, own=effect.own)
                    self.watching.heard(effect.delta)
                case fx.StoreCredential():
                    task = self._spawn(self._keep_credential(effect))
                    self._keeping.add(task)
                    task.add_done_callback(self._keeping.discard)
                case fx.Expelled():
                    self._expelled = effect.reason
                    self.stop()
                case fx.Ready():
                    self.merging.mark(effect.delta.round)
                case fx.Get():
                    if effect.link in self.links:
                        self._spawn(self.transfers.get(self.links[effect.link], effect))
                case fx.Put():
                    if effect.link in self.links:
                        self.transfers.asked(self.links[effect.link], effect.blob)
                case fx.Dial():
                    self._spawn(self._dial(effect))
                case fx.Hangup():
                    if effect.link in self.links:
                        log.debug("closing link %d: %s", effect.link, effect.reason)
                        self.links[effect.link].close_soon()
                    if effect.link in self._serving:  # it may have asked for chunks before
                        self._serving[effect.link].cancel()
                case fx.Fetched():
                    self.archive.chunk_here()
                case fx.Seal():
                    self.archive.seal(effect.round)
                case fx.Close():
                    self.archive.close(effect)
                case fx.Adopt():
                    self.archive.adopt(effect.claim)
                case fx.Blame():
                    if effect.link in self.links:
                        node_id = self.links[effect.link].node_id
                        self.policing.blame(node_id, effect.reason, effect.offence)
                case fx.Notice():
                    log.info("%s", effect.text)

    def _encode(self, message: Message) -> bytes:
        """Serialise a message; one that goes to several links is serialised once."""
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, encode(message))
        return self._encoded[1]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a short-lived task of a link or transfer; the core bounds how many there are."""
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._link_tasks.add(task)
        task.add_done_callback(self._link_tasks.discard)
        return task

    # -- links (the transport's Receiver)

    def link_up(self, link: PeerLink) -> None:
        self.links[link.number] = link
        self.watching.link_up(link)
        if link.outbound:
            self._serving[link.number] = self._spawn(self.transfers.serve_asked(link))
        self._carry_out(self.acquaintances.learn_address(link))
        self.dispatch(
            fx.LinkUp(link.number, link.node_id, link.outbound, link.address, link.credential, link.group)
        )

    def link_down(self, link: PeerLink) -> None:
        self.links.pop(link.number, None)
        self._past_traffic = [past + now for past, now in zip(self._past_traffic, _counts(link), strict=True)]
        if link.number in self._serving:
            self._serving.pop(link.number).cancel()
        if not self._stopping.is_set():
            self.dispatch(fx.LinkDown(link.number))

    async def message(self, link: PeerLink, data: bytes) -> None:
        begun = time.thread_time()
        effects = self.dispatch(fx.Received(link.number, data))
        fresh = sum(isinstance(effect, fx.Store) for effect in effects)
        pause = self.policing.heard(link, len(data), time.thread_time() - begun, fresh)
        await self.writer.room()
        if pause > 0.0:
            await link.rest(pause)

    def _turn_away(self, node_id: bytes) -> None:
        """A peer misbehaved too often: end its link."""
        for link in self.links.values():
            if link.node_id == node_id:
                link.close_soon()

    async def _dial(self, effect: fx.Dial) -> None:
        try:
            parse_address(effect.address)  # it may be a peer's word
            if not self.policing.is_greylisted(effect.node_id):
                await self.transport.dial(effect.address, effect.node_id, effect.fingerprint)
                return
        except ConfigError as error:
            log.debug("%s", error)
        except PeerError as error:
            self.policing.complain(f"{effect.address}:", str(error))
        except aiohttp.ServerFingerprintMismatch:
            self.policing.complain(f"{effect.address}:", "shows another certificate than its own row names")
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("cannot reach %s: %s", effect.address, error)
        self.dispatch(fx.DialFailed(effect.address))

    # -- who is let in (the transport asks, the core decides)

    @property
    def answers_anyone(self) -> bool:
        return self.core.charter.is_open

    def own_credential(self) -> bytes:
        return self.core.vetting.credential_of(self.identity.node_id, time.monotonic())

    def vet(self, node_id: bytes, credential: bytes) -> None:
        self.core.vetting.vet(node_id, credential, time.monotonic())

    def vet_question(self, node_id: bytes, credential: bytes) -> None:
        self.core.vetting.vet_question(node_id, credential, time.monotonic())

    def deliver(self, credential: bytes) -> None:
        self.dispatch(fx.Deliver(credential))

    async def _keep_credential(self, effect: fx.StoreCredential) -> None:
        try:
            await asyncio.to_thread(self.records.add_credential, effect.record_id, effect.data)
        except StorageError as error:  # others hold it: it comes again when we link to them
            log.error("%s", error)

    # -- chunks

    def expected_size(self, blob: bytes) -> int | None:
        return self.core.fetcher.expected_size(blob)

    async def read_chunk(self, blob: bytes) -> bytes | None:
        self.shelf.touch(blob)
        return await self.transfers.read(blob)

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        return await self.transfers.store(blob, data)

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        self.dispatch(fx.ChunkFailed(link.number, blob))

    def _refetch(self, blob: bytes) -> None:
        """A chunk on disk turned out damaged: fetch it again."""
        log.warning("chunk %s was damaged on disk; fetching it again", short(blob))
        for delta in self.core.ledger:
            if blob in delta.body.chunks:
                sizes = chunk_sizes(delta.body.payload_bytes)
                self.dispatch(fx.Need(delta.record_id, tuple(zip(delta.body.chunks, sizes, strict=True))))

    # -- the trainer

    def _welcome(self) -> control.Welcome:
        self._clock_sent = None
        return control.Welcome(
            self.manifest.canonical(),
            self.identity.node_id,
            self.core.own_last,
            self.core.clock,
            self.merging.ready,
        )

    def _trainer_changed(self) -> None:
        report = self.port.report
        if report is not None:
            self.dispatch(
                fx.Progress(
                    report.inner_steps, report.tokens, report.tokens_per_s, report.loss, report.device
                )
            )
        self.merging.look()
        self._tell_clock()

    def _tell_clock(self) -> None:
        told = (self.core.clock, self.merging.tokens, self.merging.ready, len(self.links))
        if self.port.attached and told != self._clock_sent:
            self._clock_sent = told
            self.port.send(control.Clock(*told))

    def _own_stored(self, delta: Delta) -> None:
        self.dispatch(fx.Stored(delta))
        self._acknowledge(control.Published(delta.round))

    def _acknowledge(self, message: control.Published) -> None:
        self.port.send(message)

    # -- what others see

    async def status(self, query: dict[str, str]) -> dict[str, Any]:
        digests = await self.merging.digest() if query.get("digest") else None
        status = describe(self, digests)
        up_to = query.get("up_to", "")
        if up_to.isdecimal() and len(up_to) <= 10:
            prefix = await self.merging.prefix_digest(int(up_to))
            status["prefix"] = {"up_to": int(up_to), "digest": prefix.hex() if prefix else None}
        return status

    def traffic(self) -> list[int]:
        """Bytes of all links so far: control sent and received, payload sent and received."""
        total = self._past_traffic
        for link in self.links.values():
            total = [a + b for a, b in zip(total, _counts(link), strict=True)]
        return total


def _counts(link: PeerLink) -> tuple[int, int, int, int]:
    traffic = link.traffic
    return traffic.sent, traffic.received, traffic.payload_sent, traffic.payload_received


def _first(error: BaseException) -> BaseException:
    """The first error of a task group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    """Run a daemon from its one JSON argument; exit status 2 for a mistake that a person can mend."""
    options = DaemonOptions.from_json(sys.argv[1])
    logs.configure(debug=options.debug, as_json=options.log_json)
    os.umask(0o077)  # SQLite makes files of its own
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
