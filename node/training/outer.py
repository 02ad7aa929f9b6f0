"""The outer loop of one node: from inner progress to deltas, and from Phi to parameters.

Per fragment: live parameters `theta`, the reference `ref` (float image of the Phi last applied), the
error-feedback residual `e` and the outer momentum `m`::

    publish:  g = ref - theta;  m = mu * m + g;  x = lr * (g + mu * m) + ef_decay * e
              payload = encode(x);  e = x - decode(payload);  theta = ref = ref - decode(payload)
    apply:    theta += Phi_new - ref;  ref = Phi_new

The momentum lives with the sender: a linear filter commutes with the sum over nodes, so the swarm's
Nesterov momentum (DiLoCo, arXiv 2311.08105) needs no shared state, and nothing is lost when a member goes.

Nothing here does I/O or waits. Both go through a fragment piece by piece, in memory that is kept: on the CPU
all of a piece's steps then find it in cache, and no page is touched for the first time in the training loop.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from gossamer.node.training.encoders import PIECE_CPU, SectionWriter
from gossamer.node.training.fragmentstate import FragmentState, Part, Piece, Window
from gossamer.node.training.parameters import check_fits
from gossamer.node.training.payloadwriter import BucketWriter, PayloadWriter
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT, Ints
from gossamer.protocol.manifest import Manifest

FADED = 2.0**-60
"""Momentum that weighs nothing in fixed point. Where nothing trains any more, as in the rows of words that
are never met, it would else fade until it is denormal and stay so: 30 times slower on Intel CPUs."""


MOVED = "is not finite or moved by over 64: lower the learning rate"
BEYOND = (
    "is not finite or beyond 64, which is as far as a swarm's numbers go: lower the learning rate, or rescale"
    " what it learns (the targets, say)"
)

P = ParamSpec("P")
T = TypeVar("T")


def _as_written(method: "Callable[Concatenate[OuterLoop, P], T]") -> "Callable[Concatenate[OuterLoop, P], T]":
    """Has torch compute what a method says, whatever the script's loop around it is in.

    Nothing is differentiated, and autocast casts nothing: to bf16, it would refuse parameters of fp16.
    """

    @wraps(method)
    def run(loop: "OuterLoop", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad(), ExitStack() as modes:
            for device in filter(torch.amp.is_autocast_available, loop.device_types):
                modes.enter_context(torch.autocast(device, enabled=False))
            return method(loop, *args, **kwargs)

    return run


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
        self.names = {tensor: name for name, tensor in tensors.items()}
        """Those of all the model's parameters."""
        self._outer = manifest.outer
        layout = manifest.plan()
        self.fragments = [
            FragmentState.of(fragment, tensors, self._outer.codec, base)
            for fragment, base in zip(layout.fragments, _first_bases(len(layout.fragments)), strict=True)
        ]
        self.device_types = {"cpu", *(part.device.type for state in self.fragments for part in state.parts)}
        """What it computes on."""
        self._scratch = Scratch.of(PIECE_CPU, torch.device("cpu"))

    @property
    def has_open_windows(self) -> bool:
        """Whether any fragment has learnt since it was last published."""
        return any(state.window.steps for state in self.fragments)

    @property
    def has_moved(self) -> bool:
        """Whether a parameter is not what Phi, or the last delta, has made it."""
        return any(
            not torch.equal(values[piece.span], piece.ref.to(values.dtype))
            for state in self.fragments
            for part in state.parts
            for values in (part.values(),)
            for piece in part.pieces
        )

    def step(self, tokens: int, loss: float | Tensor) -> None:
        """Note one inner step in every fragment's window."""
        if isinstance(loss, Tensor):
            # In float32, since sums in bf16 come to a standstill.
            loss = loss.item() if loss.is_cpu else loss.detach().float()
        for state in self.fragments:
            state.window.add(tokens, loss)

    @_as_written
    def apply(self, index: int, phi: Ints, merged_round: int, *, keep_progress: bool = True) -> None:
        """Move a fragment to a newer Phi, int32[fragment.numel], keeping local progress unless told not."""
        state = self.fragments[index]
        state.merged_round = merged_round
        images = torch.from_numpy(phi).split([slot.numel for slot in state.fragment.slots])
        for part in state.parts:
            values, image, room = part.values(), part.of(images), self._room(part)
            for piece in part.pieces:
                _take_over(image[piece.span], values[piece.span], piece.ref, room, keep_progress)
            part.write_back(values)
        if not keep_progress or state.window.steps == 0:
            state.window.base = max(state.window.base, merged_round)

    @_as_written
    def reset(self) -> None:
        """Set all parameters to the Phi last applied, and begin all windows anew."""
        for state in self.fragments:
            state.window = Window(base=max(state.window.base, state.merged_round))
            for theta, ref in zip(state.theta, state.ref, strict=True):
                theta.copy_(ref)

    @_as_written
    def check(self) -> None:
        """Raise DivergedError if a parameter is not finite or far out of range."""
        for state in self.fragments:
            _sound_values(state)

    @_as_written
    def publish(self, index: int, round_: int, out: memoryview) -> tuple[int, Window]:
        """Close a fragment's window: write its payload to `out`; returns its length and the window.

        Raises DivergedError if training left what fixed point can hold. Then nothing has been published of
        any tensor: a script may put sound ones back, and what it publishes next is their progress. Where one
        has moved too far, the momentum is lost.
        """
        state = self.fragments[index]
        sound = _sound_values(state)
        for part, (values, reach) in zip(state.parts, sound, strict=True):
            if self._may_go_too_far(part, reach):
                self._check_steps(state, part, values)
        try:
            return self._publish(state, sound, round_, out)
        except DivergedError:
            # By its momentum alone. Of tensors that come before the one to blame part was sent, and goes
            # nowhere: what is left of them would be published as the opposite of their progress.
            _forget(state.residual)
            raise

    def _may_go_too_far(self, part: Part, reach: float) -> bool:
        """Whether a step may be too long, or end where no healthy Phi is, by what the window has brought.

        `reach` is the largest of the part's values, in units of fixed point. What has been learnt is no more
        than twice the larger of that and the reach of `ref`.
        """
        reach = max(reach, *(_magnitude(piece.ref) * ONE for piece in part.pieces))
        times = 2.0 * self._outer.learning_rate * (1.0 + self._outer.momentum)
        return reach * (1.0 + times) >= VALUE_LIMIT

    def _check_steps(self, state: FragmentState, part: Part, values: Tensor) -> None:
        """Raise DivergedError if a step is too long, or ends where no healthy Phi is: before any is taken."""
        room = self._room(part)
        for piece in part.pieces:
            aside = piece._replace(momentum=piece.momentum.clone())
            step = self._outer_step(values[piece.span], aside, room)
            _check_length(state, part, step)
            _check_end(state, part, piece.ref * ONE - step)

    def _publish(
        self, state: FragmentState, sound: list[tuple[Tensor, float]], round_: int, out: memoryview
    ) -> tuple[int, Window]:
        writer = PayloadWriter(self._outer.codec, state.fragment, out)
        largest = 0.0
        for part, (values, reach) in zip(state.parts, sound, strict=True):
            section, room = part.section(writer), self._room(part)
            for piece in part.pieces:
                step = self._outer_step(values[piece.span], piece, room)
                magnitude = _check_length(state, part, step)
                if reach + magnitude > VALUE_LIMIT // 2:  # so seldom, for it is two passes more
                    _check_end(state, part, piece.ref * ONE - step)
                largest = max(largest, magnitude)
                self._send(values[piece.span], piece, section, room)
            part.write_back(values)
        length = writer.finish()
        closed = state.window
        closed.changed = largest > 0
        state.window = Window(base=max(round_, state.merged_round))
        state.last_published = round_
        closed.base = min(closed.base, round_ - len(self.fragments))
        return length, closed

    def _outer_step(self, theta: Tensor, piece: Piece, room: Scratch) -> Tensor:
        """A piece's step, in units of fixed point."""
        ref, momentum, step = piece.ref, piece.momentum, room.first(piece.ref.numel()).step
        mu, lr = self._outer.momentum, self._outer.learning_rate
        if theta.dtype == torch.float32:
            torch.sub(ref, theta, out=step)
        else:
            # What bf16 cannot hold of `ref` is not progress: `theta` began at the image that it can.
            step.copy_(ref.to(theta.dtype)).sub_(theta.float())
        if mu:
            torch.add(step, momentum, alpha=mu, out=momentum)
            torch.hardshrink(momentum, FADED, out=momentum)
            step.add_(momentum, alpha=mu)
        return step.mul_(lr * ONE).round_()

    def _send(
        self, theta: Tensor, piece: Piece, section: SectionWriter | BucketWriter, room: Scratch
    ) -> None:
        """Encode a piece's step, and go on from where all others will see it."""
        _, ref, residual, _ = piece
        step, sent = room.first(ref.numel())
        if self._outer.ef_decay != 1.0:
            residual.copy_(residual.float().mul_(self._outer.ef_decay).round_())
        residual.add_(sent.copy_(step)).clamp_(1 - VALUE_LIMIT, VALUE_LIMIT - 1)
        section.write(residual, sent)
        residual.sub_(sent)
        ref.sub_(step.copy_(sent), alpha=1.0 / ONE)  # exact, as every power of two
        theta.copy_(ref)

    def _room(self, part: Part) -> Scratch:
        numel = max((piece.ref.numel() for piece in part.pieces), default=0)
        if part.device.type == "cpu" and numel <= PIECE_CPU:
            return self._scratch
        return Scratch.of(numel, part.device)


def _magnitude(step: Tensor) -> float:
    """The largest of its values; NaN if any is. Two reductions are faster than `aminmax`."""
    if not step.numel():  # a script has emptied a parameter, which is said where that is looked for
        return 0.0
    return max(-float(step.amin()), float(step.amax()))


def _sound_values(state: FragmentState) -> list[tuple[Tensor, float]]:
    """The values of each of a fragment's parts, and the largest in units of fixed point.

    Raises DivergedError.
    """
    found = []
    for part in state.parts:
        values, reach = part.values(), 0.0
        for piece in part.pieces:
            magnitude = _magnitude(values[piece.span]) * ONE
            if not magnitude < VALUE_LIMIT:
                raise _diverged(state, part, values.float() * ONE, BEYOND)
            reach = max(reach, magnitude)
        found.append((values, reach))
    return found


def _check_length(state: FragmentState, part: Part, step: Tensor) -> float:
    """The largest of a step's values. Raises DivergedError if that is more than fixed point holds."""
    magnitude = _magnitude(step)
    if not magnitude < VALUE_LIMIT:
        _forget(state.momentum)
        raise _diverged(state, part, step, MOVED)
    return magnitude


def _check_end(state: FragmentState, part: Part, end: Tensor) -> None:
    """Raise DivergedError if a step ends where no healthy Phi is: it would be the end of the swarm's, too."""
    if not _magnitude(end) < VALUE_LIMIT:
        _forget(state.momentum)
        raise _diverged(state, part, end, BEYOND)


def _diverged(state: FragmentState, part: Part, step: Tensor, what: str) -> DivergedError:
    """Says `what` happened to the tensor whose step or values these are, in units of fixed point."""
    numels = [step.numel()] if part.bucket is None else part.bucket.numels
    steps = zip(part.places, step.split(numels), strict=True)
    place = next(place for place, one in steps if not _magnitude(one) < VALUE_LIMIT)
    name = state.fragment.slots[place].spec.name
    return DivergedError(f"tensor {name!r} {what}")


def _first_bases(fragments: int) -> list[int]:
    """The round of each that came before the first which publishes it."""
    return [index - fragments if index else 0 for index in range(fragments)]


def _forget(momentum: list[Tensor]) -> None:
    """What is not finite would stay so: a script that puts sound parameters back could not publish again."""
    for tensor in momentum:
        tensor.zero_()


def _take_over(phi: Tensor, theta: Tensor, ref: Tensor, room: Scratch, keep_progress: bool) -> None:
    """Move one piece to a newer Phi, int32 on the CPU."""
    image, spare = room.first(ref.numel())
    image.copy_(phi).mul_(1.0 / ONE)
    # Progress is exact where theta has moved little.
    if keep_progress and theta.dtype in (torch.float32, torch.float64):
        theta.sub_(ref).add_(image)
    elif keep_progress:
        # In float32, from one image that bf16 can hold to the other: progress rounded on its way would move
        # theta at every apply, also where Phi has not changed.
        rounded = ref.to(theta.dtype)
        moved = spare.view(torch.float32).copy_(theta).sub_(rounded)
        theta.copy_(moved.add_(rounded.copy_(image)))
    else:
        theta.copy_(image)
    ref.copy_(image)
