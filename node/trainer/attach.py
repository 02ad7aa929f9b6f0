"""`Peer.attach`: a script becomes a node. With several ranks, the first starts the node and tells the
others.
"""

import logging
import multiprocessing
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node import logs
from gossamer.node.daemon.phi.restore import has_model
from gossamer.node.home import Home, manifest_of
from gossamer.node.inputs import (
    expanded,
    read_manifest,
)
from gossamer.node.join import enter
from gossamer.node.options import NodeOptions
from gossamer.node.trainer import genesis
from gossamer.node.trainer.beside import Beside
from gossamer.node.trainer.daemon_link import CONNECT_TIMEOUT_S, OUTDATED, DaemonLink
from gossamer.node.trainer.outer import Leader
from gossamer.node.trainer.parameters import check_fits, checked_optimizers, parameters_of, reshard
from gossamer.node.trainer.ranks import Follower, RankContext, Role, Team, team_of
from gossamer.protocol.errors import ConfigError, LocalError, StorageError, UnreachableError
from gossamer.protocol.manifest import Manifest, from_canonical

# --- Starts a script's node: enters its folder, founds the swarm if the node is the first, starts the daemon.
#
# The folder is entered in the same way as by `gossamer node`.

FREE_TIMEOUT_S = 8.0
"""How long to wait for the daemon of a script that has just been killed to end."""

POLL_S = 0.1
TELL_AFTER_S = 15.0
"""When to log for the first time what is waited for. Each next time comes after twice as long."""

log = logging.getLogger("gossamer.peer")


class AttachOptions(TypedDict, total=False):
    """The keyword arguments of `Peer.attach`, which documents them and fills in the defaults."""

    manifest: Manifest | str | os.PathLike[str] | None
    join: Collection[str]
    invite: str | None
    folder: str | os.PathLike[str] | None
    name: str
    listen: str
    advertise: Sequence[str]
    swarm_id: str | None
    trust: Collection[str]
    stop_round: int
    plaintext: bool
    debug: bool


@dataclass(frozen=True, slots=True)
class StartedNode:
    """A node whose daemon listens."""

    home: Home
    manifest: Manifest
    joins: tuple[str, ...]
    advertised: tuple[str, ...]
    beside: Beside
    link: DaemonLink

    @property
    def contact(self) -> str:
        """Where others join it: the first address that they are told, or else the one on this machine."""
        here = (self.home.read_daemon() or {}).get("address", "")
        address = self.advertised[0] if self.advertised else here
        return f"gossamer://{self.link.node_id.hex()}@{address}"

    def close(self) -> None:
        """Disconnect from the daemon, and stop it."""
        try:
            self.link.close()
        finally:
            self.beside.stop()


def started(
    tensors: Mapping[str, Tensor],
    in_full: Callable[[Manifest], Mapping[str, Tensor]],
    options: AttachOptions,
) -> StartedNode:
    """Start the node of a script that trains these parameters. Raises LocalError.

    `in_full` takes the swarm's manifest, and returns the parameters whole, gathered from all ranks.
    """
    given = NodeOptions.of(**{key: value for key, value in options.items() if key != "manifest"})
    home, joins = _entered(given, _read(options["manifest"]))
    manifest = manifest_of(home)
    check_fits(tensors, manifest)
    _wait_until_free(home)
    _found_if_first(home, manifest, joins, in_full(manifest))
    # Each attach has its own socket, so that two scripts started at once cannot meet each other's daemon.
    socket = home.socket_path(secrets.token_hex(4))
    update = {
        "folder": home.root,
        "join": joins,
        "socket": socket,
        "log_level": logs.level_of(logging.getLogger("gossamer")),
    }
    beside = Beside(given.model_copy(update=update))
    advertised = given.advertise
    try:
        beside.start()
        return StartedNode(home, manifest, joins, advertised, beside, _connect(socket, manifest, beside))
    except BaseException as error:
        beside.stop()
        if isinstance(error, ConfigError) and not home.lock.is_free():  # another node took it meanwhile
            raise _in_use(home) from None
        raise


def _read(manifest: Manifest | str | os.PathLike[str] | None) -> Manifest | None:
    if manifest is None or isinstance(manifest, Manifest):
        return manifest
    if not isinstance(manifest, str | os.PathLike) or not str(manifest):
        raise ConfigError(f"manifest is {manifest!r:.60}: give a TOML file's path, or a Manifest")
    return read_manifest(expanded(Path(manifest)))


def _entered(options: NodeOptions, manifest: Manifest | None) -> tuple[Home, tuple[str, ...]]:
    """The node's folder, with its manifest in it, and whom it joins. Raises LocalError."""
    entered: Future[tuple[Home, tuple[str, ...]]] = Future()

    def run() -> None:
        try:
            entered.set_result(enter(options, manifest))
        except BaseException as error:
            entered.set_exception(error)

    # In its own thread, since a notebook's thread already runs an event loop. Ctrl-C does not wait for it.
    threading.Thread(target=run, name="entering", daemon=True).start()
    return entered.result()


def _wait_until_free(home: Home) -> None:
    """Wait for the daemon of a script that has just ended. Raises StorageError if it keeps running."""
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while not home.lock.is_free():
        if time.monotonic() > deadline:
            raise _in_use(home)
        time.sleep(POLL_S)


def _in_use(home: Home) -> StorageError:
    return StorageError(
        f"another node is running in {home.root}: stop it (leave() it, if it is this script's own), or give"
        " another folder="
    )


def _found_if_first(
    home: Home, manifest: Manifest, joins: tuple[str, ...], tensors: Mapping[str, Tensor]
) -> None:
    """Take the model as Phi_0 if there is nobody to join and was no earlier run.

    Raises ConfigError or StorageError.
    """
    if joins or home.read_peers() or has_model(home, manifest):
        return
    genesis.found(manifest, genesis.image(tensors, manifest.plan()), home)
    log.info("founding swarm %s (%s)", manifest.swarm.name, manifest.swarm_id.hex()[:12])


def _connect(socket: str, manifest: Manifest, beside: Beside) -> DaemonLink:
    """Wait until the daemon listens. Raises ConfigError if it gives up, or UnreachableError."""
    link = DaemonLink(socket, manifest)
    try:
        _wait_for_daemon(link, beside)
    except BaseException:
        link.close()
        raise
    return link


def _wait_for_daemon(link: DaemonLink, beside: Beside) -> None:
    """Wait without a limit while the daemon reads the node's model back. Once a daemon has died, it and its
    successors get `CONNECT_TIMEOUT_S`."""
    begun = lived = time.monotonic()
    tell_after = TELL_AFTER_S
    while not link.wait_connected(POLL_S):
        if beside.must_stop:
            raise beside.ending()
        if link.is_outdated:
            raise ConfigError(f"{OUTDATED}: start this script again")
        now = time.monotonic()
        if not beside.has_died:
            lived = now
        if now - lived > CONNECT_TIMEOUT_S:
            raise UnreachableError("the node's daemon keeps ending before it listens: its lines say why")
        if now - begun > tell_after:
            log.info(
                "waiting for the node's daemon, which reads its model back (%.0f s; at its socket: %s)",
                now - begun,
                link.problem,
            )
            tell_after *= 2


ATTACHING_TELL_AFTER_S = 3.0
TELL_EVERY_S = 30.0

_imported_in = os.getpid()


class Attached(Protocol):
    """What this module needs of a peer."""

    model: nn.Module

    @property
    def has_left(self) -> bool: ...

    @property
    def is_here(self) -> bool: ...


_attached: "weakref.WeakSet[Attached]" = weakref.WeakSet()
"""The peers of this process that have the swarm's model."""


def claim(peer: Attached) -> None:
    """Keep others from attaching this peer's model until it has left."""
    _attached.add(peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a script has become. Only the first rank has `folder` and `contact`."""

    role: Role
    optimizers: Sequence[torch.optim.Optimizer] = ()
    folder: Path | None = None
    contact: str = ""
    tell_waiting: Callable[[], None] = lambda: None
    """To be called while the swarm's model is not here: tells the person why, now and then."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    **options: Unpack[AttachOptions],
) -> Place:
    """Do what `Peer.attach` says, except waiting for the model. Raises the same errors."""
    _show_log()
    if torch.is_inference_mode_enabled():
        raise ConfigError("attach outside torch.inference_mode(): tensors made in it cannot be trained")
    _check_not_imported_by_a_worker()
    _check_knows_python()
    _do_without_threads_that_a_fork_lost()
    if isinstance(model, nn.Module):  # else `parameters_of` says what it is
        reshard(model)
    tensors = parameters_of(model)
    optimizers = checked_optimizers(optimizer, tensors)
    _check_not_attached(tensors)
    _warn_of_memory_of_several_processes(tensors)
    NodeOptions.of(**{key: value for key, value in options.items() if key != "manifest"})
    stop_round = int(options["stop_round"])
    team = team_of(tensors, model)
    try:
        if team.rank > 0:
            return Place(role=_follower(model, tensors, team, stop_round), optimizers=optimizers)
        node = None
        try:
            node = started(tensors, lambda manifest: _bound(team, manifest), options)
            _say(team, node.link.node_id)
            return _leader(model, optimizers, node, team, stop_round)
        except BaseException as error:  # such as no memory for the outer loop, or Ctrl-C
            if node is None:
                _say_failed(team, error)
            else:
                node.close()
            raise
    except BaseException:
        team.close()
        raise


def _check_not_imported_by_a_worker() -> None:
    """Raise ConfigError in a spawned worker that is importing its parent's script.

    Python runs the script there to define its functions, and would only object once the script in turn starts
    workers.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "this is a worker (of a DataLoader, say) that imports its parent's script, and would be another"
            ' node: put what only the script itself should do under if __name__ == "__main__":'
        )


def _check_knows_python() -> None:
    """Raise ConfigError if Python does not know its own path, with which the daemon is started."""
    if not sys.executable:
        raise ConfigError(
            "sys.executable is empty, as in some programs that embed Python: set it to the path of the"
            " Python that is to run this node's daemon"
        )


def _do_without_threads_that_a_fork_lost() -> None:
    """Torch's threads in the parent do not exist in a forked process, where torch would wait for them."""
    if os.getpid() != _imported_in and torch.get_num_threads() > 1:
        torch.set_num_threads(1)  # as a DataLoader's workers do
        log.warning(
            "this process was forked without torch's threads: it runs on one thread. For more, start"
            " it with multiprocessing's method 'spawn'"
        )


def _check_not_attached(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a peer has this model already: each would take the other's work for its own."""
    own = set(map(_place, tensors.values()))
    for peer in _attached:
        if peer.has_left or own.isdisjoint(_place(p) for _, p in named_tensors(peer.model)):
            continue
        raise ConfigError(
            "this model is attached already: leave() that peer first, or attach another model (not one that"
            " shares its memory, as after load_state_dict(assign=True))"
            if peer.is_here
            else "this model is attached in the process that this one was forked from: attach another, or a"
            " copy of it (copy.deepcopy), with an optimizer of its own"
        )


def _place(tensor: Tensor) -> tuple[object, int]:
    """Where a parameter lies: two parameter objects may share the place. If it has no address, its
    identity."""
    if type(tensor) is not nn.Parameter or tensor.layout is not torch.strided or not tensor.data_ptr():
        return None, id(tensor)
    return tensor.device, tensor.data_ptr()


def _warn_of_memory_of_several_processes(tensors: Mapping[str, Tensor]) -> None:
    """A model passed to `torch.multiprocessing.spawn` has the same parameters in all of its processes."""
    if multiprocessing.parent_process() is None:
        return
    plain = (p for p in tensors.values() if type(p) is nn.Parameter)  # others may not have any memory
    if any(p.requires_grad and p.is_cpu and p.is_shared() for p in plain):
        log.warning(
            "the model's parameters lie in memory shared between processes, as multiprocessing passes"
            " tensors: if another process also trains or attaches them, each takes the other's work for its"
            " own."
            " Make the model in each process, or attach a copy (copy.deepcopy) with an optimizer of its own"
        )


def _leader(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    node: StartedNode,
    team: Team,
    stop_round: int,
) -> Place:
    context = RankContext(team, stop_round, node.beside)
    leader = Leader(model, optimizers, node.manifest, node.link, context, node.home.checkpoint_path)
    return Place(
        role=leader,
        optimizers=optimizers,
        folder=node.home.root,
        contact=node.contact,
        tell_waiting=_Waiting(node.link, node.joins, is_alone=not node.home.read_peers()),
    )


def _follower(model: nn.Module, tensors: Mapping[str, Tensor], team: Team, stop_round: int) -> Follower:
    """Take part in what the first rank does. Raises ConfigError if it failed."""
    manifest = from_canonical(_heard(team))
    check_fits(tensors, manifest)
    team.bind(manifest.plan())
    node_id = _heard(team)
    beside = Beside()
    beside.start()
    return Follower(model, manifest, node_id, RankContext(team, stop_round, beside))


def _bound(team: Team, manifest: Manifest) -> Mapping[str, Tensor]:
    """The parameters in full. The other ranks hear the manifest first, and then take part in gathering."""
    _say(team, manifest.canonical())
    return team.bind(manifest.plan())


def _say(team: Team, data: bytes) -> None:
    """Tell the other ranks, which wait in `_heard`."""
    team.share(b"=" + data)


def _say_failed(team: Team, error: BaseException) -> None:
    said = str(error) if isinstance(error, LocalError) else f"the first rank failed: {error!r}"
    team.share(b"!" + said.encode())


def _heard(team: Team) -> bytes:
    """What the first rank says. Raises ConfigError if it failed."""
    said = team.share(b"")
    if said[:1] == b"!":
        raise ConfigError(said[1:].decode())
    return said[1:]


class _Waiting:
    """Tells the person what is being waited for."""

    def __init__(self, link: DaemonLink, joins: tuple[str, ...], *, is_alone: bool) -> None:
        """`is_alone`: no member has been met. If there is none to join either, the model is in the folder."""
        self._link = link
        self._joins = joins
        self._is_alone = is_alone
        self._tell_at = time.monotonic() + ATTACHING_TELL_AFTER_S

    def __call__(self) -> None:
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + TELL_EVERY_S
        if self._link.links:
            log.info(
                "waiting for the swarm's model: linked to %d nodes, fetching what they have", self._link.links
            )
        elif self._is_alone and not self._joins:
            log.info("waiting for the node's daemon, which reads the model from the folder")
        else:
            whom = ", ".join(self._joins) or "members met before"
            log.info("waiting for the swarm's model: no link yet to %s", whom)


def _show_log() -> None:
    """Show our log on standard error, unless the script has set up logging itself, or does so later."""
    ours = logging.getLogger("gossamer")
    if logging.getLogger().handlers or ours.handlers:
        return
    handler = logs.handler()
    handler.addFilter(lambda _: not logging.getLogger().handlers and ours.handlers == [handler])
    ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
