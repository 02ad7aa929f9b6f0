"""A node's folder: its key, its swarm's manifest, its ledger and its chunks.

::

    D/key                 32 secret bytes, mode 0600
    D/tls.pem             the TLS certificate and its key, made at the first start
    D/manifest            the manifest's canonical bytes
    D/invitation          our invitation from an owner, if the swarm lets in invited nodes only
    D/task                which file holds the swarm's task, if that does not come with Gossamer
    D/ledger.sqlite       signed records
    D/history.jsonl       what happened round by round, for people who watch
    D/chunks/ab/abcd...   payload and snapshot chunks by hash
    D/trainer.checkpoint  residuals, momenta and inner optimizer of our own trainer
    D/pretrained/         what a Hugging Face model has besides weights: configuration, tokenizer
    D/peers.json          where members were, to find the swarm again
    D/incarnation         number of our last start, in microseconds of Unix time; it always grows
    D/daemon.json         where the running daemon answers
    D/daemon.last.json    the same for the previous run, whose ports the next one takes if they are free
    D/lock                held by the running daemon

Everything is created 0700/0600; files appear whole (written aside, then renamed) or not at all.
"""

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.node.files import cannot_write, keep, remove_unfinished, write_atomically, write_first
from gossamer.protocol.access.acl import INVITATION_BYTES_MAX, AccessList, Invitation, read_invitation
from gossamer.protocol.errors import ConfigError, FolderGoneError, MalformedError, PeerError, StorageError
from gossamer.protocol.identity import Identity
from gossamer.protocol.unix_time import span

if TYPE_CHECKING:
    from gossamer.protocol.manifest import Manifest  # slow to import, and many only need paths

KEY_BYTES = 32
SOCKET_PATH_BYTES_MAX = 100
"""Unix socket paths are limited to 104 to 108 bytes, depending on the system."""

KEY_VARIABLE, KEY_FILE_VARIABLE = "GOSSAMER_KEY", "GOSSAMER_KEY_FILE"
"""A node's key as 64 hexadecimal digits, or a file of it: for folders that do not outlive their machine."""

LOCK_S = 0.2
"""How long another process may hold a folder's lock before we conclude that a node runs there: one that asks
whether a folder is free holds the lock for a moment."""

LOCK_POLL_S = 0.005
EXPIRES_SOON_S = 3 * 86_400.0

log = logging.getLogger("gossamer.node")


def _locked(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file or folder, unless another process holds a lock on it. Raises OSError."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def given_key() -> bytes | None:
    """The key in this process's environment, None if there is none. No message ever holds it.

    Raises ConfigError.
    """
    text, path = (os.environ.get(name, "").strip() for name in (KEY_VARIABLE, KEY_FILE_VARIABLE))
    if not (text or path):
        return None
    try:
        data = text.encode() if text else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{KEY_FILE_VARIABLE}={path}: {error.strerror}") from None
    if text or len(data) != KEY_BYTES:  # a file may also be a copy of a folder's key
        try:
            data = bytes.fromhex(data.decode())
        except ValueError:
            data = b""
        if len(data) != KEY_BYTES:
            where = KEY_VARIABLE if text else f"{KEY_FILE_VARIABLE}={path}"
            raise ConfigError(
                f"{where} is no key: give {2 * KEY_BYTES} hexadecimal digits (openssl rand -hex 32)"
            )
    return data


class Home:
    """Paths and small files of one node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.key_path = root / "key"
        self.tls_path = root / "tls.pem"
        self.manifest_path = root / "manifest"
        self.invitation_path = root / "invitation"
        self.task_path = root / "task"
        self.ledger_path = root / "ledger.sqlite"
        self.history_path = root / "history.jsonl"
        self.chunks_path = root / "chunks"
        self.daemon_path = root / "daemon.json"
        self.last_daemon_path = root / "daemon.last.json"
        self.peers_path = root / "peers.json"
        self.incarnation_path = root / "incarnation"
        self.checkpoint_path = root / "trainer.checkpoint"
        self.pretrained_path = root / "pretrained"
        self.lock_path = root / "lock"
        self.locked: list[int] = []
        """Files that are locked until they are closed, as the end of our process does."""

    # -- the folder

    def create(self) -> None:
        """Make the folder. Raises StorageError."""
        try:
            for folder in (*reversed(self.root.parents), self.root):  # parents that we make are private too
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise _unusable(self.root, error) from None

    def lock(self) -> None:
        """Make sure that no other daemon uses this folder as long as this process lives. Raises StorageError.

        The folder itself is locked too, where its file system can do that: a person may remove the file, and
        one key would sign twice.
        """
        deadline = time.monotonic() + LOCK_S
        in_use = StorageError(f"another node is running in {self.root}; stop it or choose another folder")
        try:
            file = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            folder = os.open(self.root, os.O_RDONLY)
            self.locked += file, folder
            while not _locked(file):
                if time.monotonic() > deadline:
                    raise in_use
                time.sleep(LOCK_POLL_S)
            with suppress(OSError):  # a file system that locks no folders
                if not _locked(folder):
                    raise in_use
        except OSError as error:
            raise _unusable(self.lock_path, error) from None

    def is_free(self) -> bool:
        """Whether no daemon uses this folder now, as far as can be found out; makes no file in it."""
        try:
            file = os.open(self.lock_path, os.O_RDONLY)
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        try:
            return _locked(file, fcntl.LOCK_SH)  # and let go again
        except OSError:
            return False
        finally:
            os.close(file)

    def tidy(self) -> None:
        """Remove files that a crash left unfinished here."""
        ours = {path.name for path in vars(self).values() if isinstance(path, Path)}
        remove_unfinished(self.root.glob(".*-*"), ours.__contains__)
        remove_unfinished(self.pretrained_path.rglob(".*-*"), lambda name: True)
        with suppress(OSError):
            outside = self._socket_outside("-*")
            # Of scripts that were killed with their daemons.
            for path in (*self.root.glob("trainer-*.sock"), *outside.parent.glob(outside.name)):
                path.unlink(missing_ok=True)

    def socket_path(self, mark: str = "") -> str:
        """Path of the socket where a trainer finds the daemon: in the folder or, if that is too long, in the
        system's folder for temporary files. With a `mark`, only a process that knows the mark finds it.

        Raises StorageError.
        """
        mark = mark and f"-{mark}"
        inside = (self.root / f"trainer{mark}.sock").absolute()
        if len(os.fsencode(inside)) <= SOCKET_PATH_BYTES_MAX:
            return str(inside)
        with suppress(OSError):
            outside = self._socket_outside(mark)
            outside.parent.mkdir(mode=0o700, exist_ok=True)
            found = outside.parent.lstat()
            is_ours = found.st_uid == os.getuid() and not found.st_mode & 0o077
            if is_ours and len(os.fsencode(outside)) <= SOCKET_PATH_BYTES_MAX:
                return str(outside)
        raise StorageError(
            f"the path of {self.root} is too long for a socket: choose a shorter one, or set TMPDIR to a"
            " short path of a folder of your own"
        )

    def _socket_outside(self, mark: str) -> Path:
        """Raises OSError if the system has no folder for temporary files."""
        ours = sha256(os.fsencode(self.root.absolute())).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"gossamer-{os.getuid()}" / f"{ours}{mark}.sock"

    # -- who the node is

    @property
    def has_key(self) -> bool:
        """Whether this folder is a node's already. A link counts, even if its disk is not mounted."""
        return os.path.lexists(self.key_path)

    def identity(self, like: "Home | None" = None) -> Identity:
        """Read the key. The first time it is that of the environment or of the folder `like`, or a new one.

        Raises ConfigError, or StorageError, also for a key that could not be used there: a copy of a damaged
        one would stay when that is restored.
        """
        given = given_key()
        if like is not None and given is None:
            like.identity()
        try:
            if not self.has_key:
                fresh = like.key_path.read_bytes() if like else os.urandom(KEY_BYTES)
                write_first(self.key_path, given or fresh)
            if self.key_path.stat().st_mode & 0o077:
                raise StorageError(f"{self.key_path} can be read by others; run: chmod 600 {self.key_path}")
            seed = self.key_path.read_bytes()
            if given not in (None, seed):
                raise StorageError(
                    f"{self.key_path} is another key than the environment gives ({KEY_VARIABLE},"
                    f" {KEY_FILE_VARIABLE}): unset that, or choose another folder"
                )
            return Identity.from_seed(seed)
        except OSError as error:
            raise _unusable(self.key_path, error) from None
        except ConfigError as error:
            raise StorageError(f"{self.key_path} is damaged ({error}); restore it from a backup") from None

    def next_incarnation(self) -> int:
        """A number greater than at every earlier start, even if the clock was set back."""
        try:
            last = int(self.incarnation_path.read_text())
        except (OSError, ValueError):
            last = 0
        incarnation = max(time.time_ns() // 1000, last + 1)
        with suppress(OSError):  # a full disk is no reason not to start
            write_atomically(self.incarnation_path, str(incarnation).encode())
        return incarnation

    # -- its swarm

    def manifest(self) -> "Manifest | None":
        """The manifest kept here, None if there is none yet. Raises StorageError."""
        from gossamer.protocol.manifest import from_canonical

        data = _read(self.manifest_path)
        try:
            return None if data is None else from_canonical(data)
        except MalformedError as error:
            raise StorageError(
                f"{self.manifest_path} is damaged ({error}); remove it and join again"
            ) from None

    def own_manifest(self) -> "Manifest":
        """The manifest, which is here since before this node's processes started. Raises StorageError."""
        manifest = self.manifest()
        if manifest is None:
            raise FolderGoneError(
                f"there is no longer a node in {self.root}: was the folder moved or removed, or its disk"
                " unmounted? Put it back, or stop this node"
            )
        return manifest

    def adopt(self, manifest: "Manifest") -> None:
        """Keep the manifest of this folder's swarm. Raises ConfigError if the folder belongs to another
        swarm, or StorageError."""
        known = self.manifest()
        if known is None:
            keep(self.manifest_path, manifest.canonical())
        elif known.swarm_id != manifest.swarm_id:
            ours, theirs = known.swarm_id.hex()[:12], manifest.swarm_id.hex()[:12]
            raise ConfigError(
                f"{self.root} belongs to swarm {ours}, not {theirs}: was the manifest written again? Give"
                " the first one, or another folder"
            )

    def invitation(self) -> Invitation | None:
        """The invitation kept here, None if there is none. Raises StorageError."""
        data = _read(self.invitation_path)
        try:
            return None if data is None else read_invitation(data[:INVITATION_BYTES_MAX].decode())
        except (UnicodeDecodeError, ConfigError) as error:
            raise StorageError(
                f"{self.invitation_path} is damaged ({error}); start the node with --invite to give it again"
            ) from None

    def keep_invitation(self, invitation: Invitation) -> None:
        """Keep this node's invitation. Raises ConfigError if it is for another node, or StorageError."""
        own = self.identity().node_id
        if invitation.grant.node_id != own:
            raise ConfigError(
                f"this invitation is for node {invitation.grant.node_id.hex()}, but {self.root} is node"
                f" {own.hex()}; ask an owner for an invitation for that id"
            )
        keep(self.invitation_path, invitation.to_text().encode())

    def task(self) -> str | None:
        """The task's file and class, as ``--task`` named them; None if it never did. Raises StorageError."""
        data = _read(self.task_path)
        return None if data is None else os.fsdecode(data)

    def keep_task(self, text: str) -> None:
        """Keep which file holds the task, for the next start. Raises StorageError."""
        keep(self.task_path, os.fsencode(text))  # a file's name may be no text

    # -- where things were found last

    def write_peers(self, contacts: Sequence[str]) -> None:
        """Remember where members were. Raises OSError."""
        write_atomically(self.peers_path, json.dumps({"contacts": list(contacts)}).encode())

    def read_peers(self) -> tuple[str, ...]:
        """What `write_peers` remembered; empty if nothing is usable."""
        found = (_facts(self.peers_path) or {}).get("contacts", ())
        return tuple(map(str, found))

    def write_daemon(self, **facts: Any) -> None:
        """Write down where the running daemon answers. Raises StorageError."""
        keep(self.daemon_path, json.dumps(facts).encode())

    def read_daemon(self) -> dict[str, Any] | None:
        """Where the running daemon answers, or the last one did. None while one starts, or if unusable."""
        return _facts(self.daemon_path)

    def set_daemon_aside(self) -> None:
        """A daemon starts: set the last one's facts aside, since another node may answer there by now."""
        with suppress(OSError):
            self.daemon_path.replace(self.last_daemon_path)

    def read_last_daemon(self) -> dict[str, Any]:
        """The facts set aside by this start, or by one that failed; empty if nothing is usable."""
        return _facts(self.last_daemon_path) or {}


def _unusable(path: Path, error: OSError) -> StorageError:
    hint = "is its disk mounted, and does it belong to this user?"
    return cannot_write(path, error, f"cannot use {path}: {error.strerror}; {hint}")


def _read(path: Path) -> bytes | None:
    """A file's content, None if there is none. Raises StorageError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from None


def _facts(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file that we can do without; None if there is nothing usable."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def manifest_of(home: Home) -> "Manifest":
    """The manifest in a node's folder. Raises ConfigError if there is none, or StorageError."""
    manifest = home.manifest()
    if manifest is None:
        raise ConfigError(f"{home.root} is not the folder of a node; give one with --dir")
    return manifest


# --- Where this machine's nodes have their folders.


def nodes_root() -> Path:
    """Where nodes live by default; the ``key`` in it is this machine's, see `gossamer id`.

    Raises ConfigError if this user has no home folder.
    """
    root = os.path.expanduser(os.environ.get("GOSSAMER_HOME") or "~/.gossamer")
    if root.startswith("~"):  # a user unknown to the system, as in many containers
        raise ConfigError(
            "this user has no home folder: set GOSSAMER_HOME to a folder for nodes, or name the node's own"
        )
    return Path(root)


def default_folder(swarm_id: bytes, suffix: str = "") -> Path:
    """Where a node of a swarm lives by default."""
    return nodes_root() / (swarm_id.hex()[:12] + suffix)


def new_home(folder: Path | None, swarm_id: bytes) -> Home:
    """Make a node's folder. The default folder gets this machine's own key, if any (see `gossamer id`)."""
    home = Home((folder or default_folder(swarm_id)).absolute())
    home.create()
    if folder is None and Home(nodes_root()).has_key:
        home.identity(Home(nodes_root()))
    return home


def node_in(folder: Path | None) -> Home:
    """The node in a folder; without a folder, one of this machine's only swarm. Raises ConfigError."""
    if folder is not None:
        return Home(folder)
    found = {path.parent: path.read_bytes() for path in sorted(nodes_root().glob("*/manifest"))}
    if not found:
        raise ConfigError(f"there is no node in {nodes_root()}; name a node's folder with --dir")
    if len(set(found.values())) > 1:
        raise ConfigError(f"which node? Give one of {', '.join(f'--dir {where}' for where in found)}")
    return Home(next(iter(found)))  # any will do: all hold the same model


def own_id(folder: Path | None) -> str:
    """Id of the node in a folder, or of this machine's own node; makes a key if there is none."""
    home = Home(folder or nodes_root())
    home.create()
    return home.identity().node_id.hex()


# --- Which invitation a folder goes by: the one kept there or another, whichever grants more. The command
# that starts the node may still name the first after an owner has renewed it, or promoted the node.


def runs_out_soon(expires: int | None, unix_s: float) -> str | None:
    """A warning for an invitation that ends within days, at `expires` in Unix seconds; None for any other."""
    if not expires or not 0.0 < expires - unix_s < EXPIRES_SOON_S:
        return None
    return f"the invitation runs out in {span(expires - unix_s)}; have it renewed"


def keep_better(home: Home, offered: Invitation) -> None:
    """Keep an invitation, whose addresses are newer, unless the folder's own still grants its node more. One
    without addresses, as of a grant that was renewed, gets the folder's own. Raises what
    `Home.keep_invitation` does."""
    with suppress(StorageError, PeerError):  # damaged, expired or not by an owner: of no more use
        kept = home.invitation()
        if kept and not offered.contacts:
            offered = replace(offered, contacts=kept.contacts)
        manifest = home.manifest()
        if manifest and kept and kept.swarm_id == offered.swarm_id == manifest.swarm_id:
            acl = AccessList(manifest.admission, manifest.swarm_id)
            acl.vet(kept.grant.node_id, time.time(), kept.grant.data)
            if kept.grant.rights > offered.grant.rights:
                return
    home.keep_invitation(offered)
