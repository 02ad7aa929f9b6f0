"""`Peer.attach`: a script becomes a node. With several ranks, the first starts the node and tells the
others."""

import logging
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Unpack

import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node import logs
from gossamer.node.ipc.daemon_link import DaemonLink
from gossamer.node.training.arguments import check_arguments
from gossamer.node.training.beside import Beside
from gossamer.node.training.follower import Follower
from gossamer.node.training.leader import Leader
from gossamer.node.training.parameters import check_fits, checked_optimizers, parameters_of
from gossamer.node.training.rank_role import RankRole
from gossamer.node.training.ranks import team_of
from gossamer.node.training.sharding import reshard
from gossamer.node.training.starting import AttachOptions, StartedNode, started
from gossamer.node.training.team import Team
from gossamer.node.wording import for_a_script
from gossamer.protocol.errors import ConfigError, LocalError
from gossamer.protocol.manifest import Manifest, from_canonical

TELL_AFTER_S = 3.0
TELL_EVERY_S = 30.0

_imported_in = os.getpid()

log = logging.getLogger("gossamer.peer")


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

    role: RankRole
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
    check_arguments(options)
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
    leader = Leader(
        model,
        optimizers,
        node.manifest,
        node.link,
        team,
        checkpoint=node.home.checkpoint_path,
        stop_round=stop_round,
        beside=node.beside,
    )
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
    return Follower(model, manifest, team, node_id=node_id, stop_round=stop_round, beside=beside)


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
        self._tell_at = time.monotonic() + TELL_AFTER_S

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
    handler = logs.handler(wording=for_a_script)
    handler.addFilter(lambda _: not logging.getLogger().handlers and ours.handlers == [handler])
    ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
