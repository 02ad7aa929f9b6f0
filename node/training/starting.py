"""Starts a script's node: enters its folder, founds the swarm if the node is the first, starts the daemon.

The folder is entered in the same way as by `gossamer node`.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from torch import Tensor

from gossamer.node import logs
from gossamer.node.address import check_is_swarm
from gossamer.node.entering import enter_invited, enter_swarm
from gossamer.node.folders import new_home
from gossamer.node.given import (
    checked_advertise,
    checked_join,
    checked_trust,
    given_invitation,
    read_manifest,
)
from gossamer.node.ipc.daemon_link import CONNECT_TIMEOUT_S, OUTDATED, DaemonLink
from gossamer.node.options import DaemonOptions
from gossamer.node.phi.restore import has_model
from gossamer.node.storage.home import Home, manifest_of
from gossamer.node.tilde import expanded
from gossamer.node.training import genesis
from gossamer.node.training.beside import Beside
from gossamer.node.training.parameters import check_fits
from gossamer.protocol.admission.invitation import Invitation
from gossamer.protocol.errors import ConfigError, StorageError, UnreachableError
from gossamer.protocol.manifest import Manifest

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
    trusted = checked_trust(options["trust"])
    advertised = checked_advertise(options["advertise"])
    home, joins = _entered(options)
    manifest = manifest_of(home)
    check_fits(tensors, manifest)
    _wait_until_free(home)
    _found_if_first(home, manifest, joins, in_full(manifest))
    # Each attach has its own socket, so that two scripts started at once cannot meet each other's daemon.
    socket = home.socket_path(secrets.token_hex(4))
    beside = Beside(
        DaemonOptions(
            folder=home.root,
            listen=options["listen"],
            advertise=advertised,
            join=joins,
            trust=trusted,
            name=options["name"],
            plaintext=options["plaintext"],
            socket=socket,
            debug=options["debug"],
            log_level=logs.level_of(logging.getLogger("gossamer")),
        )
    )
    try:
        beside.start()
        return StartedNode(home, manifest, joins, advertised, beside, _connect(socket, manifest, beside))
    except BaseException as error:
        beside.stop()
        if isinstance(error, ConfigError) and not home.lock.is_free():  # another node took it meanwhile
            raise _in_use(home) from None
        raise


def _entered(options: AttachOptions) -> tuple[Home, tuple[str, ...]]:
    """The node's folder, with its manifest in it, and whom it joins. Raises LocalError."""
    invitation = given_invitation(options["invite"])
    joins = checked_join(options["join"] or (invitation.contacts if invitation else ()))
    entered: Future[Home] = Future()

    def enter() -> None:
        try:
            entered.set_result(_enter(joins, invitation, options))
        except BaseException as error:
            entered.set_exception(error)

    # In its own thread, since a notebook's thread already runs an event loop. Ctrl-C does not wait for it.
    threading.Thread(target=enter, name="entering", daemon=True).start()
    return entered.result(), joins


def _enter(joins: tuple[str, ...], invitation: Invitation | None, options: AttachOptions) -> Home:
    manifest, swarm_id, plaintext = options["manifest"], options["swarm_id"], options["plaintext"]
    folder = expanded(Path(options["folder"])) if options["folder"] is not None else None
    given = manifest
    if not (given is None or isinstance(given, Manifest)):
        given = read_manifest(expanded(Path(given)))
    if given is not None:
        check_is_swarm(given.swarm_id, swarm_id, "the manifest describes")
    if invitation is not None:
        return enter_invited(invitation, joins, folder, plaintext, given, swarm_id)
    if given is not None:
        home = new_home(folder, given.swarm_id)
        home.adopt(given)
        return home
    if joins or folder is not None:
        return enter_swarm(joins, folder.absolute() if folder else None, swarm_id, plaintext, _tell)
    raise ConfigError("which swarm? Give Peer.attach a manifest, a node's folder, or join=[ADDRESS]")


def _tell(text: str) -> None:
    log.info("%s", text)


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
