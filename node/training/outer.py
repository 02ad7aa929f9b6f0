"""The outer loop of one node: from inner progress to deltas, and from Phi to parameters.

Per fragment: live parameters `theta`, the reference `ref` (float image of the Phi last applied), the
error-feedback residual `e` and the outer momentum `m` (DESIGN, section 4)::

    publish:  g = ref - theta;  m = mu * m + g;  x = lr * (g + mu * m) + ef_decay * e
              payload = encode(x);  e = x - decode(payload);  theta = ref = ref - decode(payload)
    apply:    theta += Phi_new - ref;  ref = Phi_new

The momentum lives with the sender: a linear filter commutes with the sum over nodes, so the swarm's
Nesterov momentum (DiLoCo, arXiv 2311.08105) needs no shared state, and nothing is lost when a member goes.

Nothing here does I/O or waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.node.training.encoders import encode_fragment
from gossamer.node.training.parameters import check_fits
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT, Ints
from gossamer.protocol.layout import Fragment
from gossamer.protocol.manifest import Manifest


@dataclass(slots=True)
class Window:
    """What the inner loop did since this node's last delta of a fragment."""

    base: int
    """The round up to which the fragment was merged when the window began."""
    steps: int = 0
    tokens: int = 0
    loss: float | Tensor = 0.0
    """Sum over the steps; a tensor stays on its device until the window closes."""

    def add(self, tokens: int, loss: float | Tensor) -> None:
        self.steps += 1
        self.tokens += tokens
        self.loss = self.loss + loss

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / max(1, self.steps)


@dataclass(slots=True)
class FragmentState:
    """One fragment's tensors, each list in the order of the fragment's slots."""

    fragment: Fragment
    theta: list[Tensor]
    ref: list[Tensor]
    residual: list[Tensor]
    """int32 fixed point."""
    momentum: list[Tensor]
    window: Window
    last_published: int = 0
    merged_round: int = field(default=0)


class OuterLoop:
    """All fragments of one model."""

    def __init__(self, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Bind to a model's parameters by name. Raises ConfigError naming the first that does not fit."""
        check_fits(tensors, manifest)
        self._outer = manifest.outer
        layout = manifest.plan()
        self.fragments = [
            self._bind(fragment, tensors, len(layout.fragments)) for fragment in layout.fragments
        ]

    @staticmethod
    def _bind(fragment: Fragment, tensors: Mapping[str, Tensor], count: int) -> FragmentState:
        theta = [tensors[slot.spec.name] for slot in fragment.slots]
        return FragmentState(
            fragment,
            theta,
            ref=[p.detach().float().clone() for p in theta],
            residual=[torch.zeros(p.shape, dtype=torch.int32, device=p.device) for p in theta],
            momentum=[torch.zeros(p.shape, dtype=torch.float32, device=p.device) for p in theta],
            window=Window(base=fragment.index - count if fragment.index else 0),
        )

    def step(self, tokens: int, loss: float | Tensor) -> None:
        """Note one inner step in every fragment's window."""
        # In float32, since sums in bf16 come to a standstill.
        loss = loss.detach().float() if isinstance(loss, Tensor) else loss
        for state in self.fragments:
            state.window.add(tokens, loss)

    @torch.no_grad()
    def apply(self, index: int, phi: Ints, merged_round: int, *, keep_progress: bool = True) -> None:
        """Move a fragment to a newer Phi, int32[fragment.numel], keeping local progress unless told not."""
        state = self.fragments[index]
        state.merged_round = merged_round
        for i, slot in enumerate(state.fragment.slots):
            theta, ref = state.theta[i], state.ref[i]
            image = _float_image(phi[slot.span], theta)
            if keep_progress and theta.dtype == torch.float32:
                theta.add_(image - ref)
            elif keep_progress:
                progress = theta - ref.to(theta.dtype)  # exact where theta has moved little
                theta.copy_(image).add_(progress)
            else:
                theta.copy_(image)
            ref.copy_(image)
        if not keep_progress or state.window.steps == 0:
            state.window.base = max(state.window.base, merged_round)

    @torch.no_grad()
    def reset(self) -> None:
        """Set all parameters to the Phi last applied, and begin all windows anew."""
        for state in self.fragments:
            state.window = Window(base=max(state.window.base, state.merged_round))
            for theta, ref in zip(state.theta, state.ref, strict=True):
                theta.copy_(ref)

    @torch.no_grad()
    def publish(self, index: int, round_: int, out: memoryview) -> tuple[int, Window]:
        """Close a fragment's window: write its payload to `out`; returns its length and the window.

        Raises DivergedError if training left what fixed point can hold.
        """
        state = self.fragments[index]
        wanted = [self._outer_step(state, i) for i in range(len(state.theta))]
        length, decoded = encode_fragment(self._outer.codec, state.fragment, wanted, out)
        for i, sent in enumerate(decoded):
            torch.sub(wanted[i], sent, out=state.residual[i])
            state.ref[i].sub_(sent.float(), alpha=1.0 / ONE)  # exact, as every power of two
            state.theta[i].copy_(state.ref[i])
        closed = state.window
        state.window = Window(base=max(round_, state.merged_round))
        state.last_published = round_
        closed.base = min(closed.base, round_ - len(self.fragments))
        return length, closed

    def _outer_step(self, state: FragmentState, i: int) -> Tensor:
        """The tensor's step in fixed point, residual included: int32."""
        mu, lr = self._outer.momentum, self._outer.learning_rate
        theta = state.theta[i]
        # What bf16 cannot hold of `ref` is not progress: `theta` began at the image that it can.
        gradient = state.ref[i].to(theta.dtype).float() - theta.float()
        if mu:
            state.momentum[i].mul_(mu).add_(gradient)
            gradient = gradient.add_(state.momentum[i], alpha=mu)
        step = gradient.mul_(lr * ONE).round_()
        low, high = step.aminmax()  # one pass, and NaN if any value is
        if not (low > -VALUE_LIMIT) & (high < VALUE_LIMIT):
            name = state.fragment.slots[i].spec.name
            raise DivergedError(f"tensor {name!r} is not finite or moved by over 64: lower the learning rate")
        residual = state.residual[i]
        if self._outer.ef_decay != 1.0:
            residual = residual.double().mul_(self._outer.ef_decay).round_().int()
        return step.int().add_(residual).clamp_(1 - VALUE_LIMIT, VALUE_LIMIT - 1)


def _float_image(phi: Ints, like: Tensor) -> Tensor:
    """Fixed point to float32 in the shape and on the device of `like`."""
    return torch.from_numpy(phi).to(like.device).float().mul_(1.0 / ONE).view(like.shape)
