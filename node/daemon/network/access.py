"""Who is let in: the network asks, the core decides, and what owners have signed is kept on disk.

Also whether we are: a node that was never invited, or whose invitation was revoked, does not go on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from gossamer.node.daemon.storage.records import RecordWriter
from gossamer.node.home import Home, keep_better
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.access.acl import Invitation, Role, parse_grant
from gossamer.protocol.errors import ConfigError, LocalError, PeerError
from gossamer.protocol.records import open_envelope
from gossamer.protocol.replica import Replica

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

log = logging.getLogger("gossamer.node")


class Access:
    """The access list, as the network asks it."""

    def __init__(
        self,
        core: Replica,
        home: Home,
        writer: RecordWriter,
        dispatch: Callable[[ev.Event], object],
        spawn: Spawn,
        stopping: asyncio.Event,
    ) -> None:
        """Once `stopping` is set, nothing more is delivered: tasks that write to disk end or have ended."""
        self._core = core
        self._home = home
        self._writer = writer
        self._dispatch = dispatch
        self._spawn = spawn
        self._stopping = stopping
        self._own_kept = b""
        self.expelled: str | None = None
        """Why we must not go on; None if we may."""

    # -- others

    @property
    def answers_anyone(self) -> bool:
        return self._core.acl.is_open

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def own_credential(self) -> bytes:
        return self._core.access.credential_of(self._core.identity.node_id, time.monotonic())

    def vet(self, node_id: bytes, credential: bytes) -> None:
        self._core.access.vet(node_id, credential, time.monotonic())

    def vet_question(self, node_id: bytes, credential: bytes) -> None:
        self._core.access.vet_question(node_id, credential, time.monotonic())

    def deliver(self, credential: bytes) -> None:
        self._core.acl.check_of_use(credential)
        self._dispatch(ev.Deliver(credential))

    # -- what owners have signed

    def keep(self, effect: fx.StoreCredential) -> None:
        """Write a grant or revocation to disk."""
        self._writer.add(effect)
        self._spawn(self.keep_own())

    async def keep_own(self) -> None:
        """Keep this node's grant, which owners may have renewed, where its next start looks for it."""
        data, swarm_id = self.own_credential(), self._core.swarm_id
        if self.answers_anyone or data in (b"", self._own_kept):
            return
        self._own_kept = data
        try:
            renewed = Invitation(swarm_id, parse_grant(open_envelope(data, swarm_id)), ())
            await asyncio.to_thread(keep_better, self._home, renewed)
        except LocalError as error:
            log.warning("%s: the next start of this node may use an older invitation", error)

    # -- ourselves

    def check_own(self) -> None:
        """Check that others would let us in: if not, it is better said once, and now. Raises ConfigError."""
        own, acl = self._core.identity.node_id, self._core.acl
        try:
            self.vet(own, b"")
        except PeerError as error:
            hint = "" if acl.revocation_of(own) else "; start it with --invite INVITATION"
            raise ConfigError(f"{error}{hint}") from None
        if self._core.info.trains and acl.role_of(own) is not Role.TRAIN:
            raise ConfigError(
                "this node was invited to observe, not to train; start it with gossamer node --observe"
            )

    def check_expelled(self) -> None:
        """Raises ConfigError if an owner has revoked us, or another process has our key."""
        if self.expelled is not None:
            raise ConfigError(self.expelled)
