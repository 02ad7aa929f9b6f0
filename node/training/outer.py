"""The outer loop of one node: from inner progress to deltas, and from Phi to parameters.

Per fragment: live parameters `theta`, the reference `ref` (float image of the Phi last applied), the
error-feedback residual `e` and the outer momentum `m` (DESIGN, section 4)::

    publish:  g = ref - theta;  m = mu * m + g;  x = lr * (g + mu * m) + ef_decay * e
              payload = encode(x);  e = x - decode(payload);  theta = ref = ref - decode(payload)
    apply:    theta += Phi_new - ref;  ref = Phi_new

The momentum lives with the sender: a linear filter commutes with the sum over nodes, so the swarm's
Nesterov momentum (DiLoCo, arXiv 2311.08105) needs no shared state, and nothing is lost when a member goes.

Nothing here does I/O or waits. Both go through a fragment piece by piece, in memory that is kept: on the CPU
all of a piece's steps then find it in cache, and no page is touched for the first time in the training loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.node.training.encoders import PIECE_CPU, PayloadWriter, SectionWriter, piece_numel
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
    """Sum over the steps; that of a device stays there until the window closes."""
    changed: bool = False
    """Whether its delta holds anything; known once it is closed."""

    def add(self, tokens: int, loss: float | Tensor) -> None:
        self.steps += 1
        self.tokens += tokens
        self.loss = self.loss + loss

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / max(1, self.steps)


class Piece(NamedTuple):
    """So much of one tensor, in row-major order, as is worked on at a time."""

    span: slice
    ref: Tensor
    residual: Tensor
    momentum: Tensor


@dataclass(slots=True)
class FragmentState:
    """One fragment's tensors, each list in the order of the fragment's slots."""

    fragment: Fragment
    theta: list[Tensor]
    ref: list[Tensor]
    residual: list[Tensor]
    """int32 fixed point."""
    momentum: list[Tensor]
    pieces: list[list[Piece]]
    """Of each tensor: views, made once, for making one takes as long as working through a thousand values."""
    window: Window
    last_published: int = 0
    merged_round: int = field(default=0)


class Scratch(NamedTuple):
    """Room for what is computed of one piece."""

    step: Tensor
    """float32."""
    sent: Tensor
    """int32."""

    @classmethod
    def of(cls, numel: int, device: torch.device) -> "Scratch":
        step = torch.zeros(numel, dtype=torch.float32, device=device)
        return cls(step, torch.zeros(numel, dtype=torch.int32, device=device))

    def first(self, numel: int) -> "Scratch":
        """Room for so many values."""
        return self if numel == self.step.numel() else Scratch(self.step[:numel], self.sent[:numel])


class OuterLoop:
    """All fragments of one model."""

    def __init__(self, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Bind to a model's parameters by name. Raises ConfigError naming the first that does not fit."""
        check_fits(tensors, manifest)
        self._outer = manifest.outer
        layout = manifest.plan()
        self.fragments = [
            _bind(fragment, tensors, len(layout.fragments), self._outer.codec)
            for fragment in layout.fragments
        ]
        self._scratch = Scratch.of(PIECE_CPU, torch.device("cpu"))

    def step(self, tokens: int, loss: float | Tensor) -> None:
        """Note one inner step in every fragment's window."""
        if isinstance(loss, Tensor):
            # In float32, since sums in bf16 come to a standstill.
            loss = loss.item() if loss.is_cpu else loss.detach().float()
        for state in self.fragments:
            state.window.add(tokens, loss)

    @torch.no_grad()
    def apply(self, index: int, phi: Ints, merged_round: int, *, keep_progress: bool = True) -> None:
        """Move a fragment to a newer Phi, int32[fragment.numel], keeping local progress unless told not."""
        state = self.fragments[index]
        state.merged_round = merged_round
        for slot, theta, pieces in zip(state.fragment.slots, state.theta, state.pieces, strict=True):
            values, image = theta.detach().reshape(-1), torch.from_numpy(phi[slot.span])
            room = self._room(pieces, theta.device)
            for piece in pieces:
                _take_over(image[piece.span], values[piece.span], piece.ref, room, keep_progress)
            _write_back(values, theta)
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
        writer = PayloadWriter(self._outer.codec, state.fragment, out)
        largest = 0.0
        for slot, theta, pieces in zip(state.fragment.slots, state.theta, state.pieces, strict=True):
            values, section = theta.detach().reshape(-1), writer.section(theta.device)
            room = self._room(pieces, theta.device)
            for piece in pieces:
                largest = max(self._publish_piece(values[piece.span], piece, section, room), largest)
                if not largest < VALUE_LIMIT:
                    _forget(state.momentum)
                    name = slot.spec.name
                    raise DivergedError(
                        f"tensor {name!r} is not finite or moved by over 64: lower the learning rate"
                    )
            _write_back(values, theta)
        length = writer.finish()
        closed = state.window
        closed.changed = largest > 0
        state.window = Window(base=max(round_, state.merged_round))
        state.last_published = round_
        closed.base = min(closed.base, round_ - len(self.fragments))
        return length, closed

    def _publish_piece(self, theta: Tensor, piece: Piece, section: SectionWriter, room: Scratch) -> float:
        """Encode a piece's step, and go on from where all others will see it.

        Returns the step's largest magnitude, in units of fixed point. If that is not under VALUE_LIMIT, fixed
        point cannot hold what training came to, and nothing was done.
        """
        _, ref, residual, momentum = piece
        step, sent = room.first(ref.numel())
        self._outer_step(theta, ref, momentum, step)
        # NaN if any value is; two reductions are faster than `aminmax`.
        largest = max(-float(step.amin()), float(step.amax()))
        if not largest < VALUE_LIMIT:
            return largest
        if self._outer.ef_decay != 1.0:
            residual.copy_(residual.double().mul_(self._outer.ef_decay).round_())
        residual.add_(sent.copy_(step)).clamp_(1 - VALUE_LIMIT, VALUE_LIMIT - 1)
        section.write(residual, sent)
        residual.sub_(sent)
        ref.sub_(step.copy_(sent), alpha=1.0 / ONE)  # exact, as every power of two
        theta.copy_(ref)
        return largest

    def _outer_step(self, theta: Tensor, ref: Tensor, momentum: Tensor, step: Tensor) -> None:
        """Leave a piece's step in `step`, in units of fixed point."""
        mu, lr = self._outer.momentum, self._outer.learning_rate
        if theta.dtype == torch.float32:
            torch.sub(ref, theta, out=step)
        else:
            # What bf16 cannot hold of `ref` is not progress: `theta` began at the image that it can.
            step.copy_(ref.to(theta.dtype)).sub_(theta.float())
        if mu:
            torch.add(step, momentum, alpha=mu, out=momentum)
            step.add_(momentum, alpha=mu)
        step.mul_(lr * ONE).round_()

    def _room(self, pieces: list[Piece], device: torch.device) -> Scratch:
        numel = max((piece.ref.numel() for piece in pieces), default=0)
        return self._scratch if device.type == "cpu" and numel <= PIECE_CPU else Scratch.of(numel, device)


def _bind(fragment: Fragment, tensors: Mapping[str, Tensor], count: int, codec: str) -> FragmentState:
    """A fragment's state as training begins; `count` fragments there are."""
    theta = [tensors[slot.spec.name] for slot in fragment.slots]
    ref = [p.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True) for p in theta]
    residual = [torch.zeros(p.shape, dtype=torch.int32, device=p.device) for p in theta]
    momentum = [torch.zeros(p.shape, dtype=torch.float32, device=p.device) for p in theta]
    return FragmentState(
        fragment,
        theta,
        ref,
        residual,
        momentum,
        pieces=[
            _pieces(*state, piece_numel(codec, state[0]))
            for state in zip(ref, residual, momentum, strict=True)
        ],
        window=Window(base=fragment.index - count if fragment.index else 0),
    )


def _pieces(ref: Tensor, residual: Tensor, momentum: Tensor, size: int) -> list[Piece]:
    spans = (slice(start, min(start + size, ref.numel())) for start in range(0, ref.numel(), size))
    return [Piece(span, *(t.view(-1)[span] for t in (ref, residual, momentum))) for span in spans]


def _write_back(values: Tensor, tensor: Tensor) -> None:
    """Finish what was done to a tensor's values in row-major order: a copy, if it lies otherwise."""
    if not tensor.is_contiguous():
        tensor.copy_(values.view(tensor.shape))


def _forget(momentum: list[Tensor]) -> None:
    """What is not finite would stay so: a script that puts sound parameters back could not publish again."""
    for tensor in momentum:
        tensor.zero_()


def _take_over(phi: Tensor, theta: Tensor, ref: Tensor, room: Scratch, keep_progress: bool) -> None:
    """Move one piece to a newer Phi, int32 on the CPU."""
    image = room.first(ref.numel()).step.copy_(phi).mul_(1.0 / ONE)
    # Progress is exact where theta has moved little.
    if keep_progress and theta.dtype == torch.float32:
        theta.sub_(ref).add_(image)
    elif keep_progress:
        progress = theta - ref.to(theta.dtype)
        theta.copy_(image).add_(progress)
    else:
        theta.copy_(image)
    ref.copy_(image)
