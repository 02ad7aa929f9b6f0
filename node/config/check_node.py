"""Checks one node for `gossamer config check`: from its settings to the machine that it is to run on."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gossamer.node.address import is_loopback, is_swarm, parse_address, parse_contact
from gossamer.node.config.check_folder import check_folder, check_invitation
from gossamer.node.config.check_machine import (
    check_admin,
    check_advertised,
    check_apart,
    check_device,
    check_disk,
    check_listen,
    check_open_files,
)
from gossamer.node.config.check_manifest import check_manifest, disk_needed
from gossamer.node.config.check_swarm import ask_nodes
from gossamer.node.config.findings import Finding, error
from gossamer.node.folders import default_folder, nodes_root
from gossamer.node.given import checked_advertise, checked_join, given_invitation, read_manifest
from gossamer.node.network.asking import Asker
from gossamer.node.network.client import fetch_manifest
from gossamer.node.renewal import better_invitation
from gossamer.node.storage.home import Home
from gossamer.protocol.admission.charter import Role
from gossamer.protocol.admission.invitation import Invitation
from gossamer.protocol.errors import ConfigError, LocalError
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest

MEMBERS_GUESS = 4
"""How many members the disk must have room for, while the real number is not known."""


@dataclass(slots=True)
class NodeCheck:
    """The check of one node. Later checks use what earlier ones have found."""

    params: dict[str, Any]
    """Values by the names of the command's parameters; None for a value that is missing or wrong."""
    wrong: frozenset[str]
    """Keys of the parameters that were given and cannot be used."""
    is_bootstrap: bool
    offline: bool
    manifest: Manifest | None = None
    invitation: Invitation | None = None
    home: Home | None = None
    members: int = MEMBERS_GUESS

    def findings(self) -> Iterator[Finding]:
        """Check what was given, the swarm, the folder, the manifest and the machine, in this order."""
        yield from self._given()
        if not self.offline:
            yield from self._swarm()
        yield from self._folder()
        if self.manifest is not None:
            data = self.params.get("data") or ()
            yield from check_manifest(self.manifest, trains=self._trains, task=self._task(), data=data)
        yield from self._machine()

    @property
    def _trains(self) -> bool:
        invited_to = self.invitation.grant.role if self.invitation else Role.TRAIN
        return not self.is_bootstrap and not self.params.get("observe") and invited_to is Role.TRAIN

    def _task(self) -> str | None:
        """Which file holds the swarm's task: as given or, if the node trains, as the folder remembers it."""
        given: str | None = self.params.get("task")
        try:
            return given or (self.home.task() if self.home is not None and self._trains else None)
        except LocalError:
            return None

    @property
    def _named_swarm(self) -> bytes | None:
        """The swarm of the manifest or the invitation."""
        if self.manifest is not None:
            return self.manifest.swarm_id
        return self.invitation.swarm_id if self.invitation is not None else None

    def _given(self) -> Iterator[Finding]:
        """Read what was given: the invitation, the manifest, and the folder, which may hold either."""
        path, folder = self.params.get("path"), self.params.get("folder")
        try:
            self.invitation = given_invitation(self.params.get("invite"))
        except LocalError as problem:
            yield error("invite", str(problem))
        try:
            self.manifest = read_manifest(path) if path is not None else None
        except LocalError as problem:
            yield error("manifest", str(problem))
        if folder is not None:
            self.home = Home(folder)
        elif self.is_bootstrap:
            self.home = self._default_home()
        if self.home is None:
            return
        try:
            self.manifest = self.manifest or self.home.manifest()
            self.invitation = self.invitation or self.home.invitation()
        except LocalError:
            return  # reported by the check of the folder

    def _default_home(self) -> Home | None:
        """Where the node lives by default; None while its swarm is not known."""
        swarm_id, suffix = self._named_swarm, "-bootstrap" if self.is_bootstrap else ""
        return Home(default_folder(swarm_id, suffix)) if swarm_id is not None else None

    def _swarm(self) -> Iterator[Finding]:
        """What the nodes to join say, and their manifest if ours is not known."""
        joined = self.params.get("join") or (self.invitation.contacts if self.invitation else ())
        contacts = tuple(map(parse_contact, checked_join(joined)))
        if not contacts:
            return
        plaintext, swarm_id = bool(self.params.get("plaintext")), self._swarm_id()
        asker = self._asker()
        answers = ask_nodes(contacts, swarm_id, plaintext=plaintext, asker=asker)
        yield from answers.findings
        self.members = answers.members + 1 if answers.members else self.members
        if self.manifest is None and answers.swarm_ids:
            try:
                self.manifest = fetch_manifest(contacts, swarm_id, plaintext=plaintext, asker=asker)
            except LocalError as problem:
                yield error("join", str(problem))

    def _swarm_id(self) -> str | None:
        """The id of the swarm that is meant, or its beginning; None if any swarm will do."""
        named = self._named_swarm
        return named.hex() if named is not None else self.params.get("swarm_id") or None

    def _identity(self) -> Identity | None:
        """The node's identity, if it has a key already: a check makes none. Raises StorageError."""
        homes = [self.home] if self.home else []
        if self.params.get("folder") is None and not self.is_bootstrap:
            homes.append(Home(nodes_root()))  # as `folders.new_home` does
        return next((home.identity() for home in homes if home.has_key), None)

    def _asker(self) -> Asker | None:
        """Ask as this node, with its invitation, since an invited swarm answers only members."""
        swarm_id = self._named_swarm
        try:
            identity = self._identity()
        except LocalError:
            return None  # reported by the check of the folder
        if identity is None or swarm_id is None:
            return None
        return Asker(identity, swarm_id, self.invitation.grant.data if self.invitation else b"")

    def _folder(self) -> Iterator[Finding]:
        if (
            not self.is_bootstrap
            and (self.home is None or not os.path.exists(self.home.manifest_path))
            and not self.params.get("join")
            and not self.wrong & {"join", "invite"}
            and not self.invitation
        ):
            yield error(
                "join",
                "which swarm? Name one of its nodes with --join, or a folder with --dir"
                if self.home is None
                else f"{self.home.root} has no manifest: name a node of the swarm with --join",
            )
        swarm_id = self.manifest.swarm_id if self.manifest else None
        self.home = self.home or self._default_home()
        if self.home is None or not self.home.has_key:
            yield from self._machines_key()
        if self.home is None:
            return
        joins = self.is_bootstrap or bool(self.params.get("join") or self.invitation)
        yield from check_folder(self.home, joins)
        if self.params.get("invite") and self.invitation is not None:
            better = better_invitation(self.home, self.invitation)
            self.invitation = replace(self.invitation, grant=better.grant)  # the given addresses stay
            yield from self._given_invitation(self.invitation, self.home)
        pinned = str(self.params.get("swarm_id") or "")
        if swarm_id is not None and not is_swarm(swarm_id, pinned):
            yield error("swarm-id", f"the swarm is {swarm_id.hex()[:12]}, not {pinned}")
        if self.is_bootstrap and swarm_id is not None:
            yield from self._other_swarm(self.home, swarm_id)

    def _machines_key(self) -> Iterator[Finding]:
        """Whether a new folder could not get this machine's key."""
        try:
            self._identity()
        except LocalError as problem:
            yield error("key", str(problem))

    def _given_invitation(self, invitation: Invitation, home: Home) -> Iterator[Finding]:
        try:
            identity = self._identity()
        except LocalError:
            return  # reported already
        if identity is None:
            own_key = self.is_bootstrap or self.params.get("folder")  # other nodes use this machine's key
            where = f" --dir {home.root}" if own_key else ""
            yield error(
                "invite",
                f"there is no key here that it could be for; send an owner what gossamer id{where} prints",
            )
            return
        swarm_id = self.manifest.swarm_id if self.manifest else None
        yield from check_invitation(invitation, identity.node_id, swarm_id)

    def _other_swarm(self, home: Home, swarm_id: bytes) -> Iterator[Finding]:
        try:
            known = home.manifest()
        except LocalError:
            return  # reported already
        if known is not None and known.swarm_id != swarm_id:
            yield error(
                "dir", f"{home.root} belongs to swarm {known.swarm_id.hex()[:12]}; choose another --dir"
            )

    def _machine(self) -> Iterator[Finding]:
        params, running = self.params, self.home is not None and self.home.lock.is_taken()
        listen = params.get("listen") or ""
        is_local = bool(params.get("plaintext")) or _all_local(params.get("join") or ())
        if listen:
            plaintext = bool(params.get("plaintext"))
            yield from check_listen(
                listen, is_running=running, is_loopback_swarm=is_local, plaintext=plaintext
            )
        if params.get("admin") is not None:
            yield from check_admin(params["admin"], is_running=running)
            yield from check_apart(listen, params["admin"]) if listen else ()
        try:
            yield from check_advertised(checked_advertise(params.get("advertise")))
        except ConfigError as problem:
            yield error("advertise", str(problem))
        if self._trains and params.get("device") is not None:
            yield from check_device(params["device"], params.get("threads") or 0)
        needed = disk_needed(self.manifest, self.members, self._trains) if self.manifest else None
        home = self.home or Home(default_folder(b""))
        yield from check_disk((home.root, home.chunks_path), needed)
        yield from check_open_files()


def _all_local(contacts: Sequence[str]) -> bool:
    hosts = [parse_address(parse_contact(text).address)[0] for text in contacts]
    return bool(hosts) and all(map(is_loopback, hosts))
