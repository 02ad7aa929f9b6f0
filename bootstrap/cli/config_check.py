"""Checks one node for `gossamer config check`: from its settings to the machine that it is to run on."""

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gossamer.bootstrap import invites as owners
from gossamer.bootstrap.cli.values import Finding, error, ok, told, warning
from gossamer.bootstrap.genesis import check_genesis
from gossamer.models.errors import TaskError
from gossamer.models.registry import build_task, resolve_options, task_names
from gossamer.models.task_file import is_own_name
from gossamer.node.address import (
    WILDCARDS,
    Contact,
    check_plaintext,
    format_address,
    is_loopback,
    is_swarm,
    parse_address,
    parse_contact,
)
from gossamer.node.daemon.dashboard.server import check_token, token_here
from gossamer.node.daemon.network import clocks
from gossamer.node.daemon.network.listening import (
    FILES_MIN,
    listen,
    names_loopback,
    open_files_allowed,
    why_not,
)
from gossamer.node.daemon.network.rpc import Asker, fetch_manifest, probe_status
from gossamer.node.daemon.phi.restore import has_model
from gossamer.node.daemon.storage.database import PATH_BYTES_MAX
from gossamer.node.home import Home, better_invitation, default_folder, nodes_root, runs_out_soon, unreadable
from gossamer.node.inputs import checked_advertise, checked_join, given_invitation, read_manifest
from gossamer.node.options import ADMIN_OFF
from gossamer.node.trainer import data as own_task
from gossamer.protocol.access.acl import Invitation, Role
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError, LocalError, NotAnsweredError
from gossamer.protocol.identity import Identity, short
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads.chunks import HASH_BYTES, chunk_sizes, payload_chunk_sizes
from gossamer.protocol.payloads.payload import payload_length

# --- Whether a node can live in its folder: writable, not in use, its files whole and of one swarm.


def check_folder(home: Home, joins: bool) -> Iterator[Finding]:
    """Look at a node's folder and change nothing; `joins` says whether the node has anybody to join."""
    if len(os.fsencode(home.chronicle_path.absolute())) > PATH_BYTES_MAX:
        most = PATH_BYTES_MAX - len(f"/{home.chronicle_path.name}")
        yield error("dir", f"the path {home.root} is too long for SQLite (over {most} bytes); choose another")
        return
    try:
        home.root.stat()
    except (FileNotFoundError, NotADirectoryError):
        if home.root.is_symlink():
            yield error("dir", f"{home.root} is a link to nothing: is its disk mounted?")
        else:
            yield _would_be_made(home.root)
        return
    except OSError as problem:
        yield error("dir", unreadable(home.root, problem))
        return
    if not home.root.is_dir() or not os.access(home.root, os.W_OK | os.X_OK):
        yield error("dir", f"{home.root} is not a writable folder; choose another --dir")
        return
    yield (
        warning("dir", f"a node is running in {home.root}; changes take effect at its next start")
        if home.lock.is_taken()
        else ok("dir", f"{home.root} exists, and no node is running in it")
    )
    if home.has_key:
        yield from told("key", lambda: f"this node is {short(home.identity().node_id)}")
    yield from _check_swarm(home, joins)


def _would_be_made(root: Path) -> Finding:
    above = next(folder for folder in root.absolute().parents if os.path.lexists(folder))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return error("dir", f"cannot create {root}: {above} is not a writable folder; choose another --dir")
    return ok("dir", f"{root} will be created")


def _check_swarm(home: Home, joins: bool) -> Iterator[Finding]:
    """Manifest, model and invitation in the folder."""
    try:
        manifest = home.manifest()
        if manifest is not None:
            name = manifest.swarm.name
            yield ok("manifest", f"the folder belongs to swarm {name!r} ({manifest.swarm_id.hex()[:12]})")
            has_begun = has_model(home, manifest)  # raises for a damaged ledger, which would end the node
            if not joins and not home.read_peers() and not has_begun:
                yield error("join", "the folder never got a model: name a node of the swarm with --join")
        invitation = home.invitation()
    except LocalError as problem:
        yield error("dir", str(problem))
        return
    if invitation is not None and home.has_key:
        try:
            own = home.identity().node_id
        except LocalError:
            return  # reported under "key"
        yield from check_invitation(invitation, own, manifest.swarm_id if manifest else None)


def check_invitation(invitation: Invitation, own: bytes, swarm_id: bytes | None) -> Iterator[Finding]:
    """Whether an invitation is for the node `own` and this swarm, and is still valid."""
    grant = invitation.grant
    if swarm_id is not None and invitation.swarm_id != swarm_id:
        yield error("invite", "the invitation is for a different swarm than the folder; choose another --dir")
    elif grant.node_id != own:
        yield error(
            "invite",
            f"the invitation is for node {grant.node_id.hex()}; ask an owner for one for {own.hex()}",
        )
    elif not grant.is_current(time.time()):
        yield error("invite", "the invitation has run out; ask an owner to renew it")
    elif (said := runs_out_soon(grant.expires, time.time())) is not None:
        yield warning("invite", said)
    else:
        yield ok("invite", f"this node is invited to {grant.role.name.lower()}")


# --- Whether this machine has what a node needs: ports, a device, disk, open files.

DISK_SPARE = 1.5
"""Free space should be this many times the estimate."""


def check_listen(
    address: str, *, is_running: bool, is_loopback_swarm: bool, plaintext: bool = False
) -> Iterator[Finding]:
    """The port that others dial."""
    host, port = parse_address(address, port_min=0)
    if plaintext:
        try:
            check_plaintext(host)
        except ConfigError as problem:
            yield error("listen", str(problem))
            return
    yield from _check_bind("listen", host, port, is_running)
    if port == 0 and not is_loopback_swarm:
        yield warning(
            "listen",
            "port 0 lets the system choose; a node that others should find needs a fixed port",
        )
    if (is_loopback(host) or names_loopback(host)) and not is_loopback_swarm:
        yield warning("listen", f"{host} can only be reached from this machine; [::] is every address")


def check_apart(listen_at: str, admin: str) -> Iterator[Finding]:
    """Whether the two ports differ."""
    if admin in ("", ADMIN_OFF):
        return
    (host, port), (other, admin_port) = (parse_address(text, port_min=0) for text in (listen_at, admin))
    if port and port == admin_port and (host == other or {host, other} & set(WILDCARDS)):
        yield error(
            "admin", f"--listen and --admin use the same port, {port}; choose another for one of them"
        )


def check_admin(option: str, *, is_running: bool) -> Iterator[Finding]:
    """The admin server's token and port."""
    is_named = option not in ("", ADMIN_OFF)
    host, port = parse_address(option, port_min=0) if is_named else ("127.0.0.1", 0)
    try:
        check_token(option, host, token_here())
    except ConfigError as problem:
        yield error("admin", str(problem))
    if is_named:
        yield from _check_bind("admin", host, port, is_running)
    else:
        yield ok("admin", "no admin server" if option else "the first free port from 7780 on 127.0.0.1")


def check_advertised(addresses: Iterable[str]) -> Iterator[Finding]:
    """Whether the names that others are told can at least be looked up here."""
    for address in addresses:
        host, port = parse_address(address)
        told_as = format_address(host, port)
        try:
            socket.getaddrinfo(host, port)
        except OSError as problem:
            yield warning("advertise", f"cannot look up {host} from here ({_why(problem)})")
        else:
            yield ok("advertise", f"others are told {told_as}; only they can tell whether it leads here")


def _check_bind(subject: str, host: str, port: int, is_running: bool) -> Iterator[Finding]:
    where = format_address(host, port)
    try:
        asyncio.run(_listen_for_a_moment(host, port))
    except (OSError, OverflowError, UnicodeError) as problem:
        if is_running:
            yield ok(subject, f"{where} is in use, as expected if that is the running node")
        else:
            why = why_not(problem) if isinstance(problem, OSError) else _why(problem)
            yield error(subject, f"cannot listen on {where}: {why}; choose another --{subject}")
    else:
        yield ok(subject, f"can listen on {where}")


async def _listen_for_a_moment(host: str, port: int) -> None:
    """Listen as the node would. Raises OSError."""
    (await listen(asyncio.Protocol, host, port, 1)).close()


def _why(problem: Exception) -> str:
    said = problem.strerror if isinstance(problem, OSError) else None
    return (said or str(problem)).lower()


def check_device(name: str, threads: int) -> Iterator[Finding]:
    """The device that would be trained on. This imports torch."""

    def chosen() -> str:
        try:
            from gossamer.node.trainer.trainer import choose_device
        except (ImportError, OSError) as problem:
            raise LocalError(f"cannot use torch: {problem}; install it for this machine") from None
        return f"can train on {choose_device(name)}"

    yield from told("device", chosen)
    cpus = os.cpu_count() or 1
    if threads > cpus:
        yield warning("threads", f"{threads} threads on {cpus} CPUs get in each other's way")


def check_disk(folders: Iterable[Path], needed: int | None) -> Iterator[Finding]:
    """Free space against what a node will need, in bytes; `needed` is None if that is not known yet.

    The folders may be on several disks: the fullest one counts.
    """
    free = min(map(_free_above, folders))
    if needed is None:
        yield ok("disk", f"{_size(free)} free; how much is needed is unknown until the swarm is asked")
    elif free < needed:
        yield error("disk", f"{_size(free)} free, but up to {_size(needed)} needed; see Sizing in the docs")
    elif free < DISK_SPARE * needed:
        yield warning("disk", f"{_size(free)} free, up to {_size(needed)} needed: that is tight")
    else:
        yield ok("disk", f"{_size(free)} free, up to {_size(needed)} needed")


def _free_above(folder: Path) -> int:
    """Bytes free where a folder is, or will be."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    return shutil.disk_usage(above).free


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def check_open_files() -> Iterator[Finding]:
    """Whether one process may have enough files and sockets open."""
    limit = open_files_allowed()
    if limit < FILES_MIN:
        yield warning(
            "files",
            f"only {limit} open files allowed; set ulimit -Hn {FILES_MIN}, or LimitNOFILE= in systemd",
        )
    else:
        yield ok("files", "enough open files allowed")


# --- A manifest's values: all of them are allowed, and yet some are seldom meant.

CLOCK_S = 120.0
SNAPSHOTS = 5
"""Snapshots on disk: usually two, four while old ones are downloaded, and one more while it is written."""

BLOCK_BYTES = 4096
"""Each chunk is a file, and most file systems allocate files in blocks of this size."""

FOLDERS = 256
"""The folders that hold the chunks; each takes a block."""

RECORD_BYTES = 1024
HASH_ROW_BYTES = 34
"""What a delta takes in the ledger, and what each chunk of its payload takes besides."""

_BELOW_FOUR_BITS = ("int2", "topk")


def check_manifest(
    manifest: Manifest, *, trains: bool = False, task: str | None = None, data: Sequence[Path] = ()
) -> Iterator[Finding]:
    """Say what the swarm is, and what is odd about it.

    `trains` says whether `gossamer node` is to train it, on `data`. `task` is the value of its --task, now or
    in an earlier run.
    """
    numel = manifest.plan().numel
    yield ok(
        "manifest",
        f"swarm {manifest.swarm.name!r} ({manifest.swarm_id.hex()[:12]}): {manifest.task.name},"
        f" {numel:,} parameters, {manifest.admission.mode}",
    )
    if manifest.task.name in task_names():
        yield from _check_task(manifest, trains, task, data)
    else:
        yield from _check_own_task(manifest, trains, task)
    for name, text in (*_odd_merging(manifest), *_odd_pace(manifest), *_odd_history(manifest)):
        yield warning(name, text)


def _check_task(
    manifest: Manifest, trains: bool, task: str | None, data: Sequence[Path]
) -> Iterator[Finding]:
    """A task that comes with Gossamer. If it is to be trained, this imports torch and reads the data."""
    name, options = manifest.task.name, manifest.task.options
    if task is not None:
        yield from told("task", lambda: str(own_task.task_file(manifest, task)))
    try:
        resolve_options(name, options)
    except TaskError as problem:
        yield error("task.options", str(problem))
        return
    if trains:
        from gossamer.models.checking import first_batch

        try:
            first_batch(build_task(name, options, data))
        except TaskError as problem:
            yield error("data", str(problem))


def _check_own_task(manifest: Manifest, trains: bool, task: str | None) -> Iterator[Finding]:
    """A custom task, in a file (which is not run here) or in a script."""
    name = manifest.task.name
    if is_own_name(name) and not trains and task is None:
        yield ok("task.name", f"{name!r} is a custom task in a file: nodes that train need --task")
        return
    try:
        difference = own_task.difference_of(manifest, own_task.task_file(manifest, task))
    except ConfigError as problem:
        yield (error if trains or task is not None else warning)("task.name", str(problem))
        return
    if difference:
        yield warning("task.source", difference)


def _odd_merging(manifest: Manifest) -> Iterator[tuple[str, str]]:
    outer, is_open = manifest.outer, manifest.admission.mode == "open"
    if outer.codec in _BELOW_FOUR_BITS and outer.momentum > 0:
        yield "outer.momentum", f"with {outer.codec}, momentum costs more than it gains; use 0"
    # topk sends such a short part of a delta that longer steps make up for it. The mean of several deltas is
    # shorter than each of them, unless the rule prevents it.
    by_mean = all(spec.averaging == "mean" for spec in manifest.layout.tensors)
    longer = 1.5 if by_mean else 1.0
    least, usual_most, most = (1.0, 3.0, 3.5) if outer.codec == "topk" else (0.4, 1.0, 1.0)
    usual = f"{least:g} to {longer * usual_most:g}"
    if outer.learning_rate > longer * most:
        yield "outer.learning_rate", f"{outer.learning_rate:g} overshoots; {usual} is usual"
    if outer.learning_rate < 0.1:
        yield (
            "outer.learning_rate",
            f"{outer.learning_rate:g} discards most of each window; {usual} is usual",
        )
    if outer.ef_decay < 0.5:
        yield "outer.ef_decay", f"{outer.ef_decay:g} forgets what the codec left out; 0.8 to 1 is usual"
    if outer.clip == 0 and is_open:
        yield (
            "outer.clip",
            "0 lets any member send a delta of any length; 1.5 is usual if anybody may join",
        )
    if outer.weight_cap == 0 and is_open:
        yield "outer.weight_cap", "0 lets any member claim any weight; 4 is usual if anybody may join"


def _odd_pace(manifest: Manifest) -> Iterator[tuple[str, str]]:
    pace = manifest.pace
    if 0 < pace.every_steps < manifest.layout.fragments:
        yield "pace.every_steps", "more fragments than steps in a window: several rounds per step"
    if 0 < pace.every_seconds < 1:
        yield (
            "pace.every_seconds",
            f"a delta every {pace.every_seconds:g} s keeps the network busier than training",
        )
    if pace.min_round_seconds > 60:
        yield "pace.min_round_seconds", f"no round can be shorter than {pace.min_round_seconds:g} s"
    if manifest.swarm.created > time.time() + CLOCK_S:
        yield (
            "swarm.created",
            "in the future: rounds are refused until then, or this machine's clock is wrong",
        )


def _odd_history(manifest: Manifest) -> Iterator[tuple[str, str]]:
    history = manifest.history
    if history.retain == 0:
        yield "history.retain", "0 keeps every payload for ever: the disk fills as long as the swarm runs"
    elif history.retain < 2 * (history.seal_after + history.snapshot_every):
        yield (
            "history.retain",
            f"a partition longer than {history.retain} rounds will not heal exactly;"
            f" {256 * manifest.layout.fragments} is usual",
        )
    if history.snapshot_every > 1000:
        yield "history.snapshot_every", "newcomers fetch every round since the last snapshot; 16 is usual"


def disk_needed(manifest: Manifest, members: int, trains: bool) -> int:
    """How many bytes a node's folder may grow to (docs/operating.md, Sizing); if `retain` is 0, in 256
    rounds."""
    layout, history = manifest.plan(), manifest.history
    codec = CODECS[manifest.outer.codec]
    payload = payload_chunk_sizes(max(payload_length(codec, fragment) for fragment in layout.fragments))
    deltas = members * ((history.retain or 256) + history.snapshot_every)
    record = RECORD_BYTES + HASH_ROW_BYTES * len(payload)
    pieces = chunk_sizes(layout.snapshot_bytes)
    snapshot = (*pieces, HASH_BYTES * len(pieces))
    trainer = 2 * 16 * layout.numel if trains else 0
    return (
        FOLDERS * BLOCK_BYTES
        + deltas * (_on_disk(payload) + record)
        + SNAPSHOTS * _on_disk(snapshot)
        + trainer
    )


def _on_disk(sizes: Iterable[int]) -> int:
    """Bytes that files of these sizes take on disk."""
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


# --- What the nodes to join say: whether they answer, for which swarm, and what time it is there.


@dataclass(slots=True)
class Answers:
    """What the nodes answered."""

    findings: list[Finding] = field(default_factory=list)
    swarm_ids: list[str] = field(default_factory=list)
    offsets: list[float | None] = field(default_factory=list)
    """How many seconds the nodes' clocks are ahead of ours."""
    members: int = 0


def ask_nodes(
    contacts: Sequence[Contact], swarm_id: str | None, *, plaintext: bool, asker: Asker | None
) -> Answers:
    """Ask all nodes at once. It is an error if one belongs to a swarm other than `swarm_id` (id or
    prefix)."""
    answers = Answers()
    asyncio.run(_ask_all(answers, contacts, swarm_id, plaintext, asker))
    if contacts and not answers.swarm_ids:
        answers.findings = [Finding("error", found.subject, found.text) for found in answers.findings]
    said = clocks.judge(answers.offsets)
    if said is not None:
        answers.findings.append(warning("clock", f"{said}: set it (NTP) before the node starts"))
    elif any(offset is not None for offset in answers.offsets):
        answers.findings.append(ok("clock", "agrees with the nodes to join"))
    return answers


async def _ask_all(
    answers: Answers,
    contacts: Sequence[Contact],
    swarm_id: str | None,
    plaintext: bool,
    asker: Asker | None,
) -> None:
    async with asyncio.TaskGroup() as group:
        for contact in contacts:
            group.create_task(_ask_one(answers, contact, swarm_id, plaintext, asker))


async def _ask_one(
    answers: Answers, contact: Contact, swarm_id: str | None, plaintext: bool, asker: Asker | None
) -> None:
    try:
        status, offset_s = await probe_status(contact, plaintext=plaintext, asker=asker)
    except NotAnsweredError as problem:
        answers.findings.append(
            warning("join", f"{problem}; a node that was never invited needs an invitation (--invite)")
        )
        return
    except LocalError as problem:
        answers.findings.append(warning("join", str(problem)))
        return
    answers.offsets.append(offset_s)
    found = str(status["swarm_id"])
    answers.swarm_ids.append(found)
    if swarm_id is not None and not found.startswith(swarm_id.lower()):
        answers.findings.append(
            error("join", f"{contact.address} belongs to swarm {found[:12]}, not {swarm_id[:12]}")
        )
        return
    members = 1 + _count(status.get("members"))
    answers.members = max(answers.members, members)
    answers.findings.append(
        ok("join", f"{contact.address} answers for swarm {found[:12]}; members: {members}")
    )


def _count(members: Any) -> int:
    return len(members) if isinstance(members, list) else 0


# --- Checks of `gossamer config check` for a bootstrap peer only: has it a first model, and is it let in.


def check_bootstrap(
    home: Home, manifest: Manifest, path: Path, *, joins: bool, is_invited: bool
) -> Iterator[Finding]:
    """Check without changing anything. `path` is the manifest's; `is_invited`: it has an invitation, given or
    kept."""
    if not joins:
        yield from told("genesis", lambda: check_genesis(home, manifest, path))
    if manifest.admission.mode == "open" or is_invited:
        return
    key = path.with_suffix(owners.SUFFIX)
    if key.exists():
        yield from told("invite", lambda: _invited_by(key, manifest, path))
    else:
        yield error(
            "invite",
            f"swarm {manifest.swarm.name!r} lets in invited nodes only: put the owner's key at {key}, or"
            " start with --invite and what gossamer invite prints for this node, whose id"
            f" gossamer id --dir {home.root} prints",
        )


def _invited_by(key: Path, manifest: Manifest, path: Path) -> str:
    owners.owner_of(manifest, path, None)
    return f"the owner's key {key} invites this peer"


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
