"""The composition root: every object of a daemon is made here, once, each after those that it needs.

There are four groups: the store (the folder, and what is in it), the core (which decides), the network, and
Phi (with the trainer to which it is offered). Monitoring reads all of them. Whatever a part has to tell the
rest goes through one of the daemon's `Edges`, so no part holds another one that is made after it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gossamer.node import __version__
from gossamer.node.address import parse_contact
from gossamer.node.daemon.dashboard.server import AdminServer, token_here
from gossamer.node.daemon.monitoring.monitor import Monitor, Sources
from gossamer.node.daemon.network.access import Access
from gossamer.node.daemon.network.address_book import AddressBook, OwnAddresses, whom_to_join
from gossamer.node.daemon.network.chunk_transfer import ChunkTransfer
from gossamer.node.daemon.network.links import Dialler, LinkTable
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.rpc import RpcServer
from gossamer.node.daemon.network.server import Server
from gossamer.node.daemon.network.sockets import Certificate, LocalNode
from gossamer.node.daemon.phi.archive import Archive
from gossamer.node.daemon.phi.data_view import DataView
from gossamer.node.daemon.phi.loop import MergeLoop, OnMerged
from gossamer.node.daemon.phi.snapshots import SnapshotShelf
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.storage.records import RecordStore, RecordWriter
from gossamer.node.daemon.trainer_port import Publisher, TrainerPort
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.history.folds import folds_bytes
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.members import NodeInfo
from gossamer.protocol.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """What the parts of a daemon may ask of it, and tell it."""

    dispatch: Callable[[ev.Event], list[fx.Effect]]
    """Give the core an event, and carry out its effects."""
    carry_out: Callable[[Iterable[fx.Effect]], None]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Run a short-lived task of a link."""
    damaged: Callable[[bytes], None]
    """A chunk on disk, named by its hash, is damaged or gone."""
    merged: OnMerged
    before_offer: Callable[[], None]
    """A fragment is about to be offered to the trainer."""
    status: Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]]
    """The answer to a node that asks for our status."""
    stopping: asyncio.Event


@dataclass(frozen=True, slots=True)
class Store:
    """The node's folder."""

    home: Home
    disk: Disk
    chunks: ChunkStore
    shelf: SnapshotShelf
    records: RecordStore
    writer: RecordWriter


@dataclass(frozen=True, slots=True)
class Network:
    """Links with other nodes, and chunks over them."""

    links: LinkTable
    scores: PeerScores
    address_book: AddressBook
    own_addresses: OwnAddresses
    access: Access
    transfers: ChunkTransfer
    server: Server
    dialler: Dialler


@dataclass(frozen=True, slots=True)
class Phi:
    """The model, and the trainer to which it is offered."""

    port: TrainerPort
    loop: MergeLoop
    archive: Archive
    publisher: Publisher
    data: DataView


Parts = tuple[Store, Replica, Network, Phi, Monitor, AdminServer]


def build(options: NodeOptions, edges: Edges, unix_offset_s: float) -> Parts:
    """Take the node's folder and put the parts together. Raises ConfigError or StorageError."""
    home, manifest = _opened(options)
    certificate = None if options.plaintext else Certificate.of(home.tls_path)
    local = LocalNode(home.identity(), manifest.swarm_id, certificate)
    store = _store(options, home, manifest, edges)
    core = Replica(
        identity=local.identity,
        manifest=manifest,
        info=_info(options, home, local.fingerprint),
        fits=store.chunks.fits,
        unix_offset_s=unix_offset_s,
        rng=random.Random(),
    )
    network = _network(local, store, core, edges)
    phi = _phi(TrainerPort(options.socket or home.socket_path(), manifest), store, core, edges)
    sources = Sources(
        home=home,
        core=core,
        port=phi.port,
        loop=phi.loop,
        archive=phi.archive,
        data=phi.data,
        links=network.links,
        server=network.server,
        scores=network.scores,
        disk=store.disk,
        stopping=edges.stopping,
    )
    monitor = Monitor(sources)
    admin = AdminServer(monitor, core.layout, options.admin, token_here())
    return store, core, network, phi, monitor, admin


def _opened(options: NodeOptions) -> tuple[Home, Manifest]:
    """A node's folder, locked for as long as this process lives. Raises StorageError.

    A missing folder is not created: it has been moved, and a new one would be in the way when it comes back.
    """
    home = Home(options.root)
    manifest = home.own_manifest()
    home.lock()
    home.set_daemon_aside()
    with suppress(OSError):  # what a crash left may stay
        home.tidy()
    return home, manifest


def _store(options: NodeOptions, home: Home, manifest: Manifest, edges: Edges) -> Store:
    chunks = ChunkStore(home.chunks_path, packing=options.packing)
    records = RecordStore(home.ledger_path, manifest.swarm_id)
    disk = Disk(home.root, home.chunks_path, on_closed=lambda: edges.dispatch(ev.Paused()))
    shelf = SnapshotShelf(chunks, manifest.plan().snapshot_bytes, folds_bytes(manifest))
    return Store(home, disk, chunks, shelf, records, RecordWriter(records, disk))


def _info(options: NodeOptions, home: Home, fingerprint: bytes) -> NodeInfo:
    """What the core has to know about this node. Raises ConfigError for invalid contacts."""
    contacts = whom_to_join(options.join, home)
    given = {parse_contact(text).address for text in options.join}
    return NodeInfo(
        name=options.name,
        trains=not options.observe,
        incarnation=home.next_incarnation(),
        bootstrap=tuple(contact.address for contact in contacts),
        pins={contact.address: contact.node_id for contact in contacts if contact.node_id},
        remembered=frozenset(contact.address for contact in contacts) - given,
        trusted=frozenset(map(bytes.fromhex, options.trust)),
        fingerprint=fingerprint,
        version=__version__,
    )


def _network(local: LocalNode, store: Store, core: Replica, edges: Edges) -> Network:
    scores = PeerScores()
    own_addresses = OwnAddresses(core, edges.carry_out)
    access = Access(core, store.home, store.writer, edges.dispatch, edges.spawn, edges.stopping)
    links = LinkTable(scores, own_addresses, store.writer, edges.dispatch)
    transfers = ChunkTransfer(
        links, store.chunks, store.shelf, store.disk, core, edges.dispatch, edges.damaged
    )
    rpc = RpcServer(local, core.manifest.canonical(), access, edges.status)
    return Network(
        links=links,
        scores=scores,
        address_book=AddressBook(store.home, core),
        own_addresses=own_addresses,
        access=access,
        transfers=transfers,
        server=Server(local, links, access, rpc, transfers),
        dialler=Dialler(local, access, links, edges.dispatch),
    )


def _phi(port: TrainerPort, store: Store, core: Replica, edges: Edges) -> Phi:
    loop = MergeLoop(core, port, edges.dispatch, edges.damaged, edges.merged, edges.before_offer)
    archive = Archive(core, loop, store.chunks, store.records, store.disk, store.shelf, edges.dispatch)
    publisher = Publisher(store.chunks, store.records, store.disk, edges.dispatch, port.send)
    return Phi(port, loop, archive, publisher, DataView(core, loop, port))
