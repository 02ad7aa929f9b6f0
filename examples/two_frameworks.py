"""One model, trained by PyTorch and JAX together: handwritten digits, and the same bits in both at the end.

    python two_frameworks.py --framework torch --listen 127.0.0.1:7700
    python two_frameworks.py --framework jax --join 127.0.0.1:7700 --dir two

Needs ``pip install 'gossamer[jax]' scikit-learn``. Ctrl-C in both ends them. JAX multiplies by matrices that
PyTorch holds transposed, and the trees have other names: the manifest says which is which, so a node needs
nothing but an address.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.node import Peer

HELD_OUT = 300
BATCH = 32
LR = 2e-3
QUIET_S = 6.0
"""A node ends when it has heard nothing new for so long. Nodes that stop together then hold the same bits."""
JAX_NAMES = {
    "hidden.kernel": "0.weight 1 0",
    "hidden.bias": "0.bias",
    "scores.kernel": "2.weight 1 0",
    "scores.bias": "2.bias",
}
"""What the tensors of PyTorch's model are in JAX's tree, and which of them are transposed."""

Floats = npt.NDArray[np.float32]


def read_digits() -> tuple[Floats, npt.NDArray[np.int64]]:
    """Images, float32[n, 64] from 0 to 1, and their digits, int64[n]; the last `HELD_OUT` are held out."""
    digits = load_digits()
    return (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)


def build_model() -> nn.Sequential:
    """The model, with the same first values on every node."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(tensors: Mapping[str, Floats]) -> float:
    """Share of held-out digits that are recognised, by PyTorch's names."""
    images, labels = (part[-HELD_OUT:] for part in read_digits())
    hidden = np.maximum(images @ tensors["0.weight"].T + tensors["0.bias"], 0)
    scores = hidden @ tensors["2.weight"].T + tensors["2.bias"]
    return float((scores.argmax(1) == labels).mean())


def batches(node_id: bytes) -> Iterator[tuple[Any, Any]]:
    """Images and labels without end, in an order of this node's own."""
    images, labels = (part[:-HELD_OUT] for part in read_digits())
    numbers = np.random.default_rng([*node_id, *np.random.SeedSequence().generate_state(1)])
    while True:
        rows = numbers.integers(0, len(images), BATCH)
        yield images[rows], labels[rows]


def train_torch(options: Mapping[str, Any]) -> dict[str, Floats]:
    """Train until told to stop. Returns the swarm's model."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with Peer.attach(model, optimizer, **options) as peer:
        with suppress(KeyboardInterrupt):
            for images, labels in batches(peer.node_id):
                loss = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                peer.step(tokens=BATCH, loss=loss)
                if peer.finished or peer.should_stop:
                    break
        peer.finish(quiet_s=QUIET_S)
        return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def train_jax(options: Mapping[str, Any]) -> dict[str, Floats]:
    """The same in JAX."""
    import jax
    import jax.numpy as jnp
    import optax

    from gossamer.node.adapters.jax import JaxPeer

    first = {name: tensor.detach().numpy() for name, tensor in build_model().named_parameters()}
    params: dict[str, dict[str, Any]] = {"hidden": {}, "scores": {}}
    for path, text in JAX_NAMES.items():
        layer, part = path.split(".")
        params[layer][part] = jnp.array(first[text.split()[0]].T)
    optimizer = optax.adamw(LR)

    def loss_of(params: Any, images: Any, labels: Any) -> Any:
        hidden = jax.nn.relu(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        scores = hidden @ params["scores"]["kernel"] + params["scores"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    def train_step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(train_step, donate_argnums=(0, 1))
    with JaxPeer.attach(params, optimizer, **options) as peer:
        params, state = peer.params, peer.state
        with suppress(KeyboardInterrupt):
            for images, labels in batches(peer.node_id):
                params, state, loss = step(params, state, images, labels)
                params, state = peer.step(params, state, tokens=BATCH, loss=loss)
                if peer.finished or peer.should_stop:
                    break
        peer.finish(quiet_s=QUIET_S)
        params = peer.params
    return {
        text.split()[0]: np.ascontiguousarray(np.asarray(params[layer][part]).T)
        for (layer, part), text in ((path.split("."), text) for path, text in JAX_NAMES.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=["torch", "jax"], required=True)
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--manifest", type=Path, default=Path("frameworks.toml"))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()

    model = build_model()
    if not options.manifest.exists():
        names = {f"jax:{path}": name for path, name in JAX_NAMES.items()}
        manifest = manifests.describe(model, name="frameworks", every_steps=200, options=names)
        manifests.write(manifest, options.manifest)
    before = accuracy({name: tensor.detach().numpy() for name, tensor in model.named_parameters()})
    train = train_jax if options.framework == "jax" else train_torch
    tensors = train(
        {
            "manifest": options.manifest,
            "join": options.join,
            "listen": options.listen,
            "folder": options.dir,
            "stop_round": options.rounds,
        }
    )
    print(f"held-out accuracy {before:.3f} -> {accuracy(tensors):.3f}")
    print("parameters", sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest())


if __name__ == "__main__":
    main()
