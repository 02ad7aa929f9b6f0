"""JAX training loops in a swarm: with PyTorch's nodes, they train one model to the same bits.

::

    with JaxPeer.attach(params, optimizer, manifest="swarm.toml", join=["host:7700"]) as peer:
        params, state = peer.params, peer.state
        while not peer.finished:
            params, state, loss = train_step(params, state, next(batches))  # jitted, donated, sharded
            params, state = peer.step(params, state, tokens=32, loss=loss)

A JAX array cannot change, so the outer loop works on a copy of the parameters: torch tensors on the CPU
(`HostModel`). Most steps leave that alone, and wait for no device. Only when a fragment is published, or a
newer Phi applied, are its arrays copied there, and come back as new arrays with the sharding that they had.

An array has the name of its path in the tree (``layers.0.kernel``), and its own axes. A swarm that PyTorch
describes has other names, and other axes: a `Linear` holds the transpose of what JAX multiplies by. Its
manifest maps them, with an option for each such array (see `mapped`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.node.options import NodeOptions
from gossamer.node.trainer.attach import StartedNode, entered
from gossamer.node.trainer.checkpoint import DTYPES as SAVED_DTYPES
from gossamer.node.trainer.parameters import DTYPES, StepBoundary
from gossamer.node.trainer.peer import Peer, mean_loss, show_log
from gossamer.node.trainer.ranks import Rank, Team
from gossamer.protocol.errors import ConfigError

try:
    import jax
    from jax.tree_util import keystr, tree_flatten_with_path
except ImportError as error:
    raise ConfigError(f"{error}: the adapter needs it; run: pip install 'gossamer[jax]'") from None

OPTION = "jax:"
"""How the manifest's options begin that map an array's path to a tensor's name."""

Places = Mapping[str, tuple[str, tuple[int, ...]]]
"""By an array's path: the tensor's name, and which axis of the array each of its own axes is."""


def mapped(names: Mapping[str, str]) -> dict[str, str]:
    """The manifest's options that map paths in the tree to the names of its tensors, for `describe`.

    A name may be followed by axes, for a tensor that is the array transposed: ``{"hidden.kernel":
    "0.weight 1 0"}`` for a matrix, ``"conv.weight 3 2 0 1"`` for a kernel HWIO that PyTorch has as OIHW.
    """
    return {OPTION + path: name for path, name in names.items()}


def _places(options: Mapping[str, Any]) -> Places:
    """What `mapped` wrote. Raises ConfigError."""
    places = {}
    for key, text in options.items():
        if key.startswith(OPTION):
            name, *axes = str(text).split()
            try:
                places[key.removeprefix(OPTION)] = name, tuple(map(int, axes))
            except ValueError:
                raise ConfigError(f"option {key!r} is {text!r}: give a tensor's name, and axes") from None
    return places


class HostModel(nn.Module):
    """A tree's arrays, and a copy of them on the CPU under the names that the swarm has for them.

    `describe` takes it as a model: ``manifests.describe(HostModel(params), name="demo")``.
    """

    def __init__(self, params: Any, places: Places | None = None) -> None:
        """Raises ConfigError for what is no tree of floating-point arrays, or does not fit `places`."""
        super().__init__()
        found: list[Any]
        self._tree: Any
        found, self._tree = tree_flatten_with_path(params)
        self.keys = [path for path, _ in found]
        self._paths = [keystr(path, simple=True, separator=".") or "params" for path in self.keys]
        self.arrays: list[Any] = [array for _, array in found]
        self._kinds = list(map(_kind, self.arrays))
        self._views: dict[str, tuple[int, Any]] = {}
        """By name: the place among the arrays, and the host's copy with the array's own axes."""
        for place, (path, array) in enumerate(zip(self._paths, self.arrays, strict=True)):
            dtype = getattr(torch, str(getattr(array, "dtype", "")), None)
            if dtype not in DTYPES or not isinstance(array, jax.Array) or not array.is_fully_addressable:
                raise ConfigError(
                    f"{path!r} in the tree is {getattr(array, 'dtype', type(array).__name__)}: give floating-"
                    "point jax.Arrays of this process only, and keep all else in another tree"
                )
            name, axes = (places or {}).get(path, (path, ()))
            axes = axes or tuple(range(array.ndim))
            if sorted(axes) != list(range(array.ndim)) or name in self._views:
                raise ConfigError(f"{path!r} is tensor {name!r} in the manifest: taken, or with other axes")
            parameter = nn.Parameter(torch.empty([array.shape[axis] for axis in axes], dtype=dtype))
            self._parameters[name] = parameter  # by its whole name: `register_parameter` allows no dots
            view = _as_array(parameter, array.dtype).transpose(np.argsort(axes))
            self._views[name] = place, view
        self.fetch(self._views)

    @property
    def params(self) -> Any:
        """The tree, with the arrays that are current."""
        return jax.tree.unflatten(self._tree, self.arrays)

    def take(self, params: Any) -> None:
        """The loop has trained: these are the arrays. Raises ValueError if they are not as attached."""
        arrays, tree = jax.tree.flatten(params)
        if tree != self._tree or list(map(_kind, arrays)) != self._kinds:
            raise ValueError("params is another tree, or has other shapes or dtypes, than was attached")
        if any(array.is_deleted() for array in arrays):
            raise ValueError("params has been donated: give step what the training step has returned")
        self.arrays = arrays

    def fetch(self, names: Collection[str]) -> None:
        """Copy arrays to the host, all shards of them; what was donated since stays as it was."""
        for place, view in map(self._views.__getitem__, names):
            if not self.arrays[place].is_deleted():
                np.copyto(view, np.asarray(self.arrays[place]))

    def send(self, names: Collection[str]) -> None:
        """Make new arrays of what the host has."""
        for place, view in map(self._views.__getitem__, names):
            # JAX may go on reading what it is given, or use it as the array.
            self.arrays[place] = jax.device_put(np.array(view), self.arrays[place].sharding)


def _kind(array: Any) -> tuple[Any, Any]:
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def _as_array(tensor: Tensor, dtype: Any) -> Any:
    """A tensor on the CPU as a NumPy array of the same memory; NumPy has no bfloat16 of its own."""
    raw = tensor.detach()
    return (raw.view(torch.uint16) if raw.dtype == torch.bfloat16 else raw).numpy().view(dtype)


class _Boundary(StepBoundary):
    """Arrays do not change. They are as at the last step, unless the loop has donated them since."""

    def __init__(self, host: HostModel) -> None:
        self._host = host

    def mark(self) -> None:
        """Nothing to note."""

    @property
    def holds(self) -> bool:
        return not any(array.is_deleted() for array in self._host.arrays)


class _Devices(Team):
    """The devices of this process: what a change touches comes to the host's copy, and goes back."""

    def __init__(self, tensors: Mapping[str, Tensor], host: HostModel) -> None:
        super().__init__(tensors)
        self._host = host

    def boundary(self, tensors: Sequence[Tensor]) -> StepBoundary:
        return _Boundary(self._host)

    @property
    def device(self) -> str:
        return ", ".join(sorted({device.platform for device in self._host.arrays[0].devices()}))

    @contextmanager
    def full(self, fragments: frozenset[int]) -> Iterator[None]:
        names = {slot.spec.name for index in fragments for slot in self._fragments[index]}
        self._host.fetch(names)
        yield
        self._host.send(names)


# --- An optimizer's state, such as Optax makes, in the node's checkpoint.


class _States(torch.optim.Optimizer):
    """The optimizer's state as a checkpoint saves it: for each parameter, the arrays of the state whose path
    ends as the parameter's does, and which have its shape; and the rest, counts for example, together."""

    def __init__(self, init: Callable[[Any], Any], host: HostModel) -> None:
        """Raises ConfigError if `init` takes no such tree."""
        self._init = init
        shapes = jax.eval_shape(init, host.params)
        self.tree: Any = None
        """The state of now."""
        parameters = [*host.parameters(), nn.Parameter(torch.zeros(()))]
        super().__init__(parameters, {})
        self.state = _ByParameter(self)  # type: ignore[assignment]
        known = {key: place for place, key in enumerate(host.keys)}
        self.structure: Any
        found, self.structure = tree_flatten_with_path(shapes)
        self.parts: dict[int, list[tuple[str, int]]] = {id(parameter): [] for parameter in parameters}
        """By a parameter's identity: the paths of its arrays in the state, and their places."""
        for place, (key, leaf) in enumerate(found):
            ends = [known[key[start:]] for start in range(len(key) + 1) if key[start:] in known]
            owners = [end for end in ends if host.arrays[end].shape == leaf.shape]
            owner = parameters[owners[0] if owners else -1]
            self.parts[id(owner)].append((keystr(key), place))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def begin(self, params: Any, *, resumed: bool) -> None:
        """The state to train on with: a fresh one or, if `resumed`, what the checkpoint held."""
        self.tree = self._init(params)
        kept: dict[int, Tensor] = self.state.kept  # type: ignore[attr-defined]
        if resumed:
            leaves = jax.tree.leaves(self.tree)
            for place, tensor in kept.items():
                values = np.array(_as_array(tensor, leaves[place].dtype))
                leaves[place] = jax.device_put(values, leaves[place].sharding)
            self.tree = jax.tree.unflatten(self.structure, leaves)
        kept.clear()

    def take(self, state: Any) -> None:
        """The loop has trained: this is the state. Raises ValueError if it is another tree."""
        if jax.tree.structure(state) != self.structure:
            raise ValueError("step takes the state as the optimizer's init and update return it")
        self.tree = state


class _ByParameter:
    """What a checkpoint reads and writes of `_States`, as of an optimizer's `state`."""

    def __init__(self, states: _States) -> None:
        self._states = states
        self.kept: dict[int, Tensor] = {}
        """By place: what a checkpoint held."""
        self.is_cleared = False

    def __len__(self) -> int:
        return len(self._states.parts)

    def get(self, parameter: Tensor, default: object) -> dict[str, Tensor]:
        """A parameter's arrays by path, copied. Raises TypeError for what a checkpoint cannot hold."""
        leaves = jax.tree.leaves(self._states.tree)
        return {path: _as_tensor(leaves[place]) for path, place in self._states.parts[id(parameter)]}

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        parts = self._states.parts[id(parameter)]
        if state.keys() != {path for path, _ in parts}:
            raise ValueError("it is of another optimizer")
        self.kept.update((place, state[path]) for path, place in parts)

    def clear(self) -> None:
        """The model has diverged."""
        self.is_cleared = True


def _as_tensor(array: Any) -> Tensor:
    dtype = SAVED_DTYPES.get(str(array.dtype))
    if dtype is None or array.is_deleted():  # donated to a step that Ctrl-C has cut short
        raise TypeError(f"a checkpoint holds no {array.dtype}, or what has been donated")
    tensor = torch.empty(array.shape, dtype=dtype)
    np.copyto(_as_array(tensor, array.dtype), np.asarray(array))
    return tensor


# --- The peer.


class JaxPeer(Peer):
    """One tree of parameters in a swarm. All that is not here is as `Peer` has it.

    `on_merged` functions read `params`. A stop that is asked for while no step runs is published by the next
    step. The model is whole, and so published when the loop ends, unless what `step` returned was donated
    since.
    """

    _sees_changes = False

    def __init__(
        self,
        model: nn.Module,
        role: Rank,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        node: StartedNode | None = None,
    ) -> None:
        super().__init__(model, role, optimizers, node)
        assert isinstance(model, HostModel)
        self._host = model
        self._states = next((one for one in optimizers if isinstance(one, _States)), None)

    @classmethod
    def attach(cls, params: Any, optimizer: Any = None, **options: Any) -> Self:  # type: ignore[override]
        """Make this script a node, as `Peer.attach` does, whose arguments `options` are.

        Args:
            params: any tree of floating-point arrays, on their devices, sharded or not.
            optimizer: what makes the inner optimizer's state: anything with an `init(params)`, such as
                Optax's. The checkpoint then keeps that state; it is in `state`, and goes through `step`.

        Raises what `Peer.attach` does.
        """
        show_log()
        settings = {key: value for key, value in options.items() if key != "manifest"}
        home, _ = entered(NodeOptions.of(**settings), options.get("manifest"))
        manifest = home.own_manifest()
        host = HostModel(params, _places(manifest.task.options))
        states = [] if optimizer is None else [_States(optimizer.init, host)]
        peer = super().attach(host, states, **{**options, "manifest": manifest, "folder": home.root})
        if peer._states is not None:
            peer._states.begin(peer.params, resumed=peer.resumed)
        return peer

    @classmethod
    def _team(cls, tensors: Mapping[str, Tensor], model: nn.Module) -> Team:
        assert isinstance(model, HostModel)
        return _Devices(tensors, model)

    @property
    def params(self) -> Any:
        """The parameters as of now: the swarm's model after `attach` and `finish`, else what the last `step`
        returned."""
        return self._host.params

    @property
    def state(self) -> Any:
        """The inner optimizer's state: after `attach`, that of this node's last run, or a fresh one."""
        return None if self._states is None else self._states.tree

    def step(  # type: ignore[override]
        self, params: Any, state: Any = None, *, tokens: int, loss: Any
    ) -> Any:
        """Record one inner step; publish and apply what is due. Returns the parameters to go on with; if
        `attach` got an optimizer, these and its state, ``params, state``.

        What was given must not be used any more.

        Args:
            params: as the training step has returned them.
            state: the optimizer's, likewise.
            tokens: as for `Peer.step`.
            loss: a number, or an array of one element, which stays on its device.

        Raises what `Peer.step` does, and ValueError if a tree is not as attached, or was donated.
        """
        self._host.take(params)
        if self._states is not None:
            self._states.take(state)
        self._sees_changes = True
        try:
            super().step(tokens, loss)
        finally:
            self._sees_changes = False
        if self._states is None:
            return self.params
        if self._states.state.is_cleared:  # type: ignore[attr-defined]
            self._states.begin(self.params, resumed=False)
            self._states.state.is_cleared = False  # type: ignore[attr-defined]
        return self.params, self.state

    def _mean(self, loss: Any) -> Any:
        if isinstance(loss, jax.Array) and loss.size == 1:
            return loss.astype("float32").reshape(())
        return mean_loss(loss)

    @contextmanager
    def average(self) -> Iterator[Any]:
        """Evaluate the averaged model, which the block gets: ``with peer.average() as params``."""
        with super().average():
            yield self.params
