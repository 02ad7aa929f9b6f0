"""`Peer.attach`: a script becomes a node.

The folder is entered as `gossamer node` enters it, the daemon is started beside the script, and the peer
begins once the swarm's model is here. Of several ranks the first does all this, and tells the others.
"""

import atexit
import logging
import os
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node import logs
from gossamer.node.address import check_swarm_id, parse_address
from gossamer.node.entering import (
    checked_advertise,
    checked_join,
    checked_trust,
    enter_invited,
    enter_swarm,
    given_invitation,
    new_home,
    read_manifest,
)
from gossamer.node.ipc.daemon_link import DaemonLink
from gossamer.node.options import DaemonOptions
from gossamer.node.peer import CONNECT_TIMEOUT_S, Peer
from gossamer.node.phi import genesis
from gossamer.node.phi.restore import has_model
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.node.storage.home import Home
from gossamer.node.training.beside import Beside
from gossamer.node.training.follower import Follower
from gossamer.node.training.parameters import check_fits, checked_optimizers, parameters_of
from gossamer.node.training.ranks import Alone, Ranks, team_of
from gossamer.protocol.errors import ConfigError, LocalError, StorageError, UnreachableError
from gossamer.protocol.invitation import Invitation
from gossamer.protocol.manifest import Manifest, from_canonical

FREE_TIMEOUT_S = 8.0
"""How long the daemon of a script that has just been killed may take to end."""

POLL_S = 0.1
TELL_AFTER_S = 3.0
TELL_EVERY_S = 30.0

_attached: "weakref.WeakSet[Peer]" = weakref.WeakSet()
"""Those of this process."""

log = logging.getLogger("gossamer.peer")


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    manifest: Manifest | str | os.PathLike[str] | None,
    join: Collection[str],
    invite: str | None,
    folder: str | os.PathLike[str] | None,
    name: str,
    listen: str,
    advertise: Sequence[str],
    swarm_id: str | None,
    trust: Collection[str],
    stop_round: int,
    plaintext: bool,
    debug: bool,
) -> Peer:
    """Do what `Peer.attach` says."""
    _show_log()
    tensors = parameters_of(model)
    optimizers = checked_optimizers(optimizer, tensors)
    _check_not_attached(tensors)
    parse_address(listen, port_min=0)
    for argument, given in {"join": join, "advertise": advertise, "trust": trust}.items():
        if isinstance(given, str):
            raise ConfigError(f"{argument} is a list: {argument}=[{given!r}]")
    if folder is not None and not os.fspath(folder):
        raise ConfigError("folder is empty: name the node's folder, or give None for the default")
    if swarm_id is not None:
        check_swarm_id(swarm_id)
    if not isinstance(stop_round, int) or stop_round < 0:
        raise ConfigError(f"stop_round is {stop_round!r}: give the last round to publish, or 0 for none")
    team = team_of(tensors)
    if isinstance(team, Ranks) and team.rank > 0:
        return _attach_follower(model, tensors, team, stop_round)
    try:
        trusted = checked_trust(trust)
        home, addresses = _entered(manifest, join, invite, folder, swarm_id, plaintext)
        known = home.manifest()
        assert known is not None
        check_fits(tensors, known)
        _wait_until_free(home)
        _found_if_first(home, known, addresses, _bound(team, known))
        options = DaemonOptions(
            folder=home.root,
            listen=listen,
            advertise=checked_advertise(advertise),
            join=addresses,
            trust=trusted,
            name=name,
            plaintext=plaintext,
            debug=debug,
            log_level=logs.level_of(logging.getLogger("gossamer")),
        )
        beside, link = _started(home, known, options)
    except BaseException as error:
        if isinstance(team, Ranks):
            said = str(error) if isinstance(error, LocalError) else f"the first rank failed: {error!r}"
            team.share(b"!" + said.encode())
        raise
    if isinstance(team, Ranks):
        team.share(b"=" + link.node_id)
    try:
        peer = Peer(
            model,
            optimizers,
            known,
            link,
            checkpoint=home.checkpoint_path,
            stop_round=stop_round,
            team=team,
            beside=beside,
        )
    except BaseException:  # no memory for what the outer loop needs, say
        link.close()
        beside.stop()
        raise
    peer.folder = home.root
    peer.contact = f"gossamer://{link.node_id.hex()}@{(home.read_daemon() or {}).get('address', '')}"
    return _begun(peer, _Waiting(peer, link, addresses))


def _check_not_attached(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a peer has this model already: each would take the other's work for progress."""
    own = set(map(id, tensors.values()))
    for peer in _attached:
        if not peer.has_left and not own.isdisjoint(id(p) for _, p in named_tensors(peer.model)):
            raise ConfigError(
                "this model is attached already: leave() that peer first, or attach another model"
            )


def _wait_until_free(home: Home) -> None:
    """Wait for the daemon of a script that has just ended. Raises StorageError if it goes on."""
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while not home.is_free():
        if time.monotonic() > deadline:
            raise StorageError(
                f"another node is running in {home.root}: stop it (leave() it, if it is this script's own),"
                " or give another folder="
            )
        time.sleep(POLL_S)


def _attach_follower(model: nn.Module, tensors: Mapping[str, Tensor], team: Ranks, stop_round: int) -> Peer:
    manifest = from_canonical(_heard(team))
    check_fits(tensors, manifest)
    team.bind(manifest.plan())
    node_id = _heard(team)
    beside = Beside()
    beside.start()
    peer = Follower(model, manifest, team, node_id=node_id, stop_round=stop_round, beside=beside)
    return _begun(peer, None)


def _bound(team: Alone | Ranks, manifest: Manifest) -> Mapping[str, Tensor]:
    """The parameters in full; other ranks hear the manifest first, and then take part."""
    if isinstance(team, Ranks):
        team.share(b"=" + manifest.canonical())
    return team.bind(manifest.plan())


def _heard(team: Ranks) -> bytes:
    """What the first rank says. Raises ConfigError if it failed."""
    said = team.share(b"")
    if said[:1] == b"!":
        raise ConfigError(said[1:].decode())
    return said[1:]


def _begun(peer: Peer, waiting: "_Waiting | None") -> Peer:
    """Wait for the swarm's model."""
    atexit.register(peer.leave_at_exit)
    try:
        if not peer.begin(waiting):
            assert peer._beside is not None
            raise peer._beside.ending()
    except BaseException:
        atexit.unregister(peer.leave_at_exit)
        peer.close()
        raise
    _attached.add(peer)
    return peer


def _entered(
    manifest: Manifest | str | os.PathLike[str] | None,
    join: Collection[str],
    invite: str | None,
    folder: str | os.PathLike[str] | None,
    swarm_id: str | None,
    plaintext: bool,
) -> tuple[Home, tuple[str, ...]]:
    """The node's folder, and whom it joins. Raises LocalError."""
    invitation = given_invitation(invite)
    addresses = checked_join(join or (invitation.contacts if invitation else ()))
    root = Path(folder) if folder is not None else None
    # In a thread of its own, for a notebook's thread runs an event loop already.
    with ThreadPoolExecutor(1) as pool:
        home = pool.submit(_enter, manifest, addresses, invitation, root, swarm_id, plaintext).result()
    return home, addresses


def _enter(
    manifest: Manifest | str | os.PathLike[str] | None,
    addresses: tuple[str, ...],
    invitation: Invitation | None,
    folder: Path | None,
    swarm_id: str | None,
    plaintext: bool,
) -> Home:
    """The node's folder, with its manifest in it. Raises LocalError."""
    given = manifest if isinstance(manifest, Manifest) or manifest is None else read_manifest(Path(manifest))
    if given is not None and swarm_id is not None and not given.swarm_id.hex().startswith(swarm_id.lower()):
        raise ConfigError(f"the manifest describes swarm {given.swarm_id.hex()[:12]}, not {swarm_id}")
    if invitation is not None:
        return enter_invited(invitation, addresses, folder, plaintext, given, swarm_id)
    if given is not None:
        home = new_home(folder, given.swarm_id)
        home.adopt(given)
        return home
    if addresses or folder is not None:
        return enter_swarm(addresses, folder.absolute() if folder else None, swarm_id, plaintext)
    raise ConfigError("which swarm? Give Peer.attach a manifest, a node's folder, or join=[ADDRESS]")


def _found_if_first(
    home: Home, manifest: Manifest, addresses: tuple[str, ...], tensors: Mapping[str, Tensor]
) -> None:
    """Where there is nobody to join and no earlier run, the model is Phi_0. Raises ConfigError."""
    if addresses or home.read_peers() or has_model(home, manifest):
        return
    genesis.found(manifest, genesis.image(tensors, manifest.plan()), ChunkStore(home.chunks_path))
    log.info("founding swarm %s (%s)", manifest.swarm.name, manifest.swarm_id.hex()[:12])


def _started(home: Home, manifest: Manifest, options: DaemonOptions) -> tuple[Beside, DaemonLink]:
    """A daemon that listens, and the link to it. Raises ConfigError or UnreachableError."""
    beside = Beside(options)
    beside.start()
    try:
        return beside, _connect(home, manifest, beside)
    except BaseException:
        beside.stop()
        raise


def _connect(home: Home, manifest: Manifest, beside: Beside) -> DaemonLink:
    """Wait until the daemon listens. Raises ConfigError if it gives up, or UnreachableError."""
    link = DaemonLink(home.socket_path(), manifest)
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            link.wait_connected(0.1)
            return link
        except UnreachableError:
            if beside.must_stop:
                link.close()
                raise beside.ending() from None
            if time.monotonic() > deadline:
                link.close()
                raise


class _Waiting:
    """Tells the person, and the daemon, what is being waited for."""

    def __init__(self, peer: Peer, link: DaemonLink, addresses: tuple[str, ...]) -> None:
        self._peer = peer
        self._link = link
        self._addresses = addresses
        self._tell_at = time.monotonic() + TELL_AFTER_S

    def __call__(self) -> None:
        self._peer._tell("joining")
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + TELL_EVERY_S
        if self._link.links:
            log.info(
                "waiting for the swarm's model: linked to %d nodes, fetching what they have", self._link.links
            )
        else:
            whom = ", ".join(self._addresses) or "members met before"
            log.info("waiting for the swarm's model: no link yet to %s", whom)


def _show_log() -> None:
    """Show our lines on standard error, unless the script has arranged for logs itself."""
    ours = logging.getLogger("gossamer")
    if not logging.getLogger().handlers and not ours.handlers:
        ours.addHandler(logs.handler())
        ours.setLevel(logging.INFO)
