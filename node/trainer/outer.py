"""The outer loop of one node: from inner progress to deltas, and from Phi to parameters.

Per fragment: live parameters `theta`, the reference `ref` (float image of the Phi last applied), the
error-feedback residual `e` and the outer momentum `m`::

    publish:  g = ref - theta;  m = mu * m + g;  x = lr * (g + mu * m) + ef_decay * e
              payload = encode(x);  e = x - decode(payload);  theta = ref = ref - decode(payload)
    apply:    theta += Phi_new - ref;  ref = Phi_new

The momentum lives with the sender: a linear filter commutes with the sum over nodes, so the swarm's
Nesterov momentum (DiLoCo, arXiv 2311.08105) needs no shared state, and nothing is lost when a member leaves.

Nothing here does I/O, or waits for anything but a GPU's payload. Both operations process a fragment piece by
piece, in memory that is kept. On the CPU a piece then stays in cache through all of its operations, and the
training loop touches no page for the first time.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import wraps
from math import inf, isnan
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from gossamer.node.trainer.encoders import PIECE_CPU, SectionWriter
from gossamer.node.trainer.fragments import FragmentState, Losses, OuterState, Part, Piece, Window
from gossamer.node.trainer.parameters import check_fits
from gossamer.node.trainer.payload_writer import BucketWriter, PayloadWriter
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT, Ints
from gossamer.protocol.manifest import Manifest, Outer

# --- The outer step of a fragment that is on one device, which is not waited for before the end.
#
# Reading back how far a step goes would wait for all work queued on the device, and leave the device idle
# until
# the next call arrives. So the device itself checks whether the longest possible step is sound, and keeps
# everything as it was if it is not.

FADED = 2.0**-60
"""Smaller momenta count for nothing in fixed point, and are set to 0. Where nothing trains any more, as in
the embedding rows of words that no longer occur, momentum would otherwise fade until it is denormal and stay
so, which is 30 times slower on Intel CPUs."""


class DeviceStep:
    """One step of all of a fragment's parts. Making it queues the check of how far they reach."""

    def __init__(self, state: FragmentState, outer: Outer) -> None:
        self._outer = outer
        reaches = [
            torch.stack(
                [
                    _largest(piece.ref),
                    _largest(_learnt(values[piece.span], piece)),
                    _largest(piece.buffers[0]),
                ]
            )
            for part in state.parts
            for values in (part.values(),)
            for piece in part.pieces
        ]
        ref, learnt, momentum = torch.stack(reaches).amax(0).unbind()
        mu = outer.momentum
        step = outer.learning_rate * ((1.0 + mu) * learnt + mu * mu * momentum)
        # A bound on the values and on where the step ends. False if anything is NaN.
        self._is_sound: Tensor = (ref + learnt + step) * ONE < VALUE_LIMIT
        self._moved = torch.zeros_like(self._is_sound)

    def take(self, theta: Tensor, piece: Piece, section: SectionWriter | BucketWriter) -> None:
        """Encode a piece's step, and set the parameters to what all others will decode."""
        _, ref, residual, (momentum,) = piece
        step, mu = _learnt(theta, piece), self._outer.momentum
        if mu:
            newer = torch.hardshrink(torch.add(step, momentum, alpha=mu), FADED)
            torch.where(self._is_sound, newer, momentum, out=momentum)
            step.add_(momentum, alpha=mu)
        step.mul_(self._outer.learning_rate * ONE).round_()
        sent = torch.where(self._is_sound, step, 0.0).int()
        self._moved |= sent.any()
        if self._outer.ef_decay != 1.0:
            decayed = residual.float().mul_(self._outer.ef_decay).round_().int()
            torch.where(self._is_sound, decayed, residual, out=residual)
        residual.add_(sent).clamp_(1 - VALUE_LIMIT, VALUE_LIMIT - 1)
        section.write(residual, sent)
        sent.mul_(self._is_sound)
        residual.sub_(sent)
        ref.sub_(step.copy_(sent), alpha=1.0 / ONE)  # scaling by a power of two is exact
        torch.where(self._is_sound, ref.to(theta.dtype), theta, out=theta)

    def outcome(self) -> tuple[bool, bool]:
        """Whether the step was taken, and whether it moved anything. Waits for the device."""
        is_sound, moved = torch.stack((self._is_sound, self._moved)).tolist()
        return is_sound, moved


def _learnt(theta: Tensor, piece: Piece) -> Tensor:
    """A piece's pseudo-gradient, float32: what bf16 cannot hold of `ref` is not part of it."""
    return piece.ref.to(theta.dtype).float() - theta.float()


def _largest(tensor: Tensor) -> Tensor:
    """The largest of a tensor's magnitudes, float32[]; NaN if any is."""
    if not tensor.numel():  # a script has emptied a parameter, which `Binding.check` reports
        return torch.zeros((), device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor, inf)
    return largest


# --- How far values and steps reach: finds what fixed point cannot hold before anything is published.

MOVED = "is not finite or moved by over 64: lower the learning rate"
BEYOND = (
    "is not finite or beyond 64, the limit of a swarm's numbers: lower the learning rate, or rescale"
    " what it learns (the targets, say)"
)


class Seen(NamedTuple):
    """A part's values, and the largest magnitude among them, in units of fixed point."""

    values: Tensor
    reach: float


def check_values(state: FragmentState) -> list[Seen]:
    """What each part of a fragment holds. Raises DivergedError if a value is not finite or beyond fixed
    point."""
    found = []
    for part in state.parts:
        values = part.values()
        reach = ONE * largest(magnitude(values[piece.span]) for piece in part.pieces)
        if not reach < VALUE_LIMIT:
            raise _diverged(state, part, values.float() * ONE, BEYOND)
        found.append(Seen(values, reach))
    return found


def check_length(state: FragmentState, part: Part, step: Tensor) -> float:
    """The largest magnitude in a step. Raises DivergedError if fixed point cannot hold it."""
    longest = magnitude(step)
    if not longest < VALUE_LIMIT:
        clear(state.buffers["momentum"])
        raise _diverged(state, part, step, MOVED)
    return longest


def check_end(state: FragmentState, part: Part, end: Tensor) -> None:
    """Raise DivergedError if a step ends where no healthy Phi is: it would be the end of the swarm's, too."""
    if not magnitude(end) < VALUE_LIMIT:
        clear(state.buffers["momentum"])
        raise _diverged(state, part, end, BEYOND)


def magnitude(step: Tensor) -> float:
    """The largest magnitude in a tensor; NaN if any is NaN. Two reductions are faster than `aminmax`."""
    if not step.numel():  # a script has emptied a parameter, which `Binding.check` reports
        return 0.0
    return max(-float(step.amin()), float(step.amax()))


def largest(numbers: Iterable[float]) -> float:
    """The largest of some numbers; NaN if any is NaN."""
    return max(numbers, key=lambda number: (isnan(number), number), default=0.0)


def clear(tensors: list[Tensor]) -> None:
    """Set tensors to zero. A value that is not finite would stay so, and a script that puts sound parameters
    back could not publish again."""
    for tensor in tensors:
        tensor.zero_()


def _diverged(state: FragmentState, part: Part, step: Tensor, what: str) -> DivergedError:
    """The error that says `what` happened to the first tensor whose step or values (in units of fixed point)
    are out of range."""
    numels = [step.numel()] if part.bucket is None else part.bucket.numels
    steps = zip(part.places, step.split(numels), strict=True)
    place = next(place for place, one in steps if not magnitude(one) < VALUE_LIMIT)
    name = state.fragment.slots[place].spec.name
    return DivergedError(f"tensor {name!r} {what}")


P = ParamSpec("P")
T = TypeVar("T")


def _as_written(method: "Callable[Concatenate[OuterLoop, P], T]") -> "Callable[Concatenate[OuterLoop, P], T]":
    """Has torch compute exactly what a method says, whatever modes the script's loop has set.

    Gradients and autocast are off: autocast to bf16 would refuse fp16 parameters.
    """

    @wraps(method)
    def run(loop: "OuterLoop", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad(), ExitStack() as modes:
            for device in filter(torch.amp.is_autocast_available, loop.device_types):
                modes.enter_context(torch.autocast(device, enabled=False))
            return method(loop, *args, **kwargs)

    return run


class Scratch(NamedTuple):
    """Memory for what is computed for one piece."""

    step: Tensor
    """float32."""
    sent: Tensor
    """int32."""

    @classmethod
    def of(cls, numel: int, device: torch.device) -> "Scratch":
        step = torch.empty(numel, dtype=torch.float32, device=device)
        return cls(step, torch.empty(numel, dtype=torch.int32, device=device))

    @classmethod
    def to_keep(cls, numel: int) -> "Scratch":
        """Memory on the CPU with all of its pages touched."""
        room = cls.of(numel, torch.device("cpu"))
        return cls(room.step.zero_(), room.sent.zero_())

    def first(self, numel: int) -> "Scratch":
        """The part for the first `numel` values."""
        return self if numel == self.step.numel() else Scratch(self.step[:numel], self.sent[:numel])


class OuterLoop(OuterState):
    """All fragments of one model."""

    def __init__(self, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Bind to a model's parameters by name. Raises ConfigError naming the first that does not fit."""
        check_fits(tensors, manifest)
        self._outer = manifest.outer
        super().__init__(tensors, manifest.plan(), self._outer.codec, ("momentum",))
        self.device_types = {"cpu", *(part.device.type for state in self.fragments for part in state.parts)}
        """Types of the devices that it computes on."""
        self._scratch = Scratch.to_keep(PIECE_CPU)
        self._losses = Losses(len(self.fragments))

    @property
    def has_open_windows(self) -> bool:
        """Whether any fragment has trained since it was last published."""
        return any(state.window.steps for state in self.fragments)

    @property
    def has_moved(self) -> bool:
        """Whether a parameter differs from what Phi, or the last delta, has made it."""
        return any(
            not torch.equal(values[piece.span], piece.ref.to(values.dtype))
            for state in self.fragments
            for part in state.parts
            for values in (part.values(),)
            for piece in part.pieces
        )

    def step(self, tokens: int, loss: float | Tensor) -> None:
        """Record one inner step in every fragment's window."""
        if isinstance(loss, Tensor):
            # In float32, since a growing sum in bf16 stops changing.
            loss = loss.item() if loss.is_cpu else loss.detach().float()
        self._losses.add(loss)
        for state in self.fragments:
            state.window.add(tokens)

    @_as_written
    def apply(self, index: int, phi: Ints | Tensor, merged_round: int, *, keep_progress: bool = True) -> None:
        """Move a fragment to a newer Phi, keeping local progress unless told not to.

        `phi`: int32[fragment.numel], on the CPU or on the fragment's device, which is then not waited for.
        """
        state = self.fragments[index]
        state.merged_round = merged_round
        phi = phi if isinstance(phi, Tensor) else torch.from_numpy(phi)
        images = phi.split([slot.numel for slot in state.fragment.slots])
        for part in state.parts:
            values, image, room = part.values(), part.of(images), self._room(part)
            for piece in part.pieces:
                _take_over(image[piece.span], values[piece.span], piece.ref, room, keep_progress)
            part.write_back(values)
        if not keep_progress or state.window.steps == 0:
            state.window.base = max(state.window.base, merged_round)

    @_as_written
    def reset(self) -> None:
        """Set all parameters to the Phi last applied, and begin all windows again."""
        self._losses = Losses(len(self.fragments))
        for state in self.fragments:
            state.window = Window(base=max(state.window.base, state.merged_round))
            for theta, ref in zip(state.theta, state.ref, strict=True):
                theta.copy_(ref)

    @_as_written
    def check(self) -> None:
        """Raise DivergedError if a parameter is not finite or far out of range."""
        for state in self.fragments:
            check_values(state)

    @_as_written
    def publish(self, index: int, round_: int, out: memoryview) -> tuple[int, Window]:
        """Close a fragment's window and write its payload to `out`; returns its length and the window.

        Raises DivergedError if training left the range of fixed point. In that case no tensor is published: a
        script may put sound values back, and publishes their progress next. If a tensor has moved too far,
        its fragment's momentum is lost.
        """
        state = self.fragments[index]
        # With mixed dtypes, `write_back` rounds its values, even where nothing was to change.
        if state.gpu is not None and not _is_mixed(state):
            if (done := self._publish_if_sound(state, round_, out)) is not None:
                return done
        found = check_values(state)
        for part, seen in zip(state.parts, found, strict=True):
            if self._may_go_too_far(part, seen.reach):
                self._check_steps(state, part, seen.values)
        try:
            return self._publish(state, found, round_, out)
        except DivergedError:
            # It diverged by its momentum alone. Tensors before the one to blame were encoded for a payload
            # that goes nowhere: their residuals would be published as the opposite of their progress.
            clear(state.residual)
            raise

    def _publish_if_sound(
        self, state: FragmentState, round_: int, out: memoryview
    ) -> tuple[int, Window] | None:
        """Publish a fragment that is on one device; None, with nothing changed, if a step might be too
        long."""
        writer = PayloadWriter(self._outer.codec, state.fragment, out)
        step = DeviceStep(state, self._outer)
        for part in state.parts:
            section, values = _section(part, writer), part.values()
            for piece in part.pieces:
                step.take(values[piece.span], piece, section)
            part.write_back(values)
        length = writer.finish()
        was_taken, moved = step.outcome()
        return (length, self._closed(state, round_, moved)) if was_taken else None

    def _may_go_too_far(self, part: Part, reach: float) -> bool:
        """Whether a step may be too long, or end outside the range of a healthy Phi, by the window's
        progress.

        `reach` is the largest of the part's values, in units of fixed point. The pseudo-gradient is at most
        twice the larger of that and the reach of `ref`.
        """
        reach = max(reach, ONE * largest(magnitude(piece.ref) for piece in part.pieces))
        times = 2.0 * self._outer.learning_rate * (1.0 + self._outer.momentum)
        return reach * (1.0 + times) >= VALUE_LIMIT

    def _check_steps(self, state: FragmentState, part: Part, values: Tensor) -> None:
        """Before any step is taken: raise DivergedError if one is too long, or ends outside the range of a
        healthy Phi."""
        room = self._room(part)
        for piece in part.pieces:
            aside = piece._replace(buffers=(piece.buffers[0].clone(),))
            step = self._outer_step(values[piece.span], aside, room)
            check_length(state, part, step)
            check_end(state, part, piece.ref * ONE - step)

    def _publish(
        self, state: FragmentState, found: list[Seen], round_: int, out: memoryview
    ) -> tuple[int, Window]:
        writer = PayloadWriter(self._outer.codec, state.fragment, out)
        longest = 0.0
        for part, (values, reach) in zip(state.parts, found, strict=True):
            section, room = _section(part, writer), self._room(part)
            for piece in part.pieces:
                step = self._outer_step(values[piece.span], piece, room)
                length = check_length(state, part, step)
                if reach + length > VALUE_LIMIT // 2:  # only then, since it takes two more passes
                    check_end(state, part, piece.ref * ONE - step)
                longest = max(longest, length)
                self._send(values[piece.span], piece, section, room)
            part.write_back(values)
        return writer.finish(), self._closed(state, round_, longest > 0)

    def _closed(self, state: FragmentState, round_: int, changed: bool) -> Window:
        """Close a fragment's window, and begin the next."""
        closed = state.window
        closed.loss = self._losses.close(state.fragment.index)
        closed.changed = changed
        closed.base = min(closed.base, round_ - len(self.fragments))
        state.window = Window(base=max(round_, state.merged_round))
        state.last_published = round_
        return closed

    def _outer_step(self, theta: Tensor, piece: Piece, room: Scratch) -> Tensor:
        """A piece's step, in units of fixed point."""
        ref, momentum, step = piece.ref, piece.buffers[0], room.first(piece.ref.numel()).step
        mu, lr = self._outer.momentum, self._outer.learning_rate
        if theta.dtype == torch.float32:
            torch.sub(ref, theta, out=step)
        else:
            # What bf16 cannot hold of `ref` is not progress: `theta` began at the bf16 image of `ref`.
            step.copy_(ref.to(theta.dtype)).sub_(theta.float())
        if mu:
            torch.add(step, momentum, alpha=mu, out=momentum)
            torch.hardshrink(momentum, FADED, out=momentum)
            step.add_(momentum, alpha=mu)
        return step.mul_(lr * ONE).round_()

    def _send(
        self, theta: Tensor, piece: Piece, section: SectionWriter | BucketWriter, room: Scratch
    ) -> None:
        """Encode a piece's step, and set the parameters to what all others will decode."""
        _, ref, residual, _ = piece
        step, sent = room.first(ref.numel())
        if self._outer.ef_decay != 1.0:
            residual.copy_(residual.float().mul_(self._outer.ef_decay).round_())
        residual.add_(sent.copy_(step)).clamp_(1 - VALUE_LIMIT, VALUE_LIMIT - 1)
        section.write(residual, sent)
        residual.sub_(sent)
        ref.sub_(step.copy_(sent), alpha=1.0 / ONE)  # scaling by a power of two is exact
        theta.copy_(ref)

    def _room(self, part: Part) -> Scratch:
        numel = max((piece.ref.numel() for piece in part.pieces), default=0)
        if part.device.type == "cpu" and numel <= PIECE_CPU:
            return self._scratch
        return Scratch.of(numel, part.device)


def _section(part: Part, writer: PayloadWriter) -> SectionWriter | BucketWriter:
    """Begin a part of a payload."""
    if part.bucket is None:
        return writer.section(part.places[0], part.device)
    return writer.bucket(part.places, part.bucket)


def _is_mixed(state: FragmentState) -> bool:
    """Whether some tensors that are processed together have different dtypes by now."""
    return any(len({theta.dtype for theta in part.theta}) > 1 for part in state.parts)


def _take_over(phi: Tensor, theta: Tensor, ref: Tensor, room: Scratch, keep_progress: bool) -> None:
    """Move one piece to a newer Phi, int32."""
    image, spare = room.first(ref.numel())
    if phi.device != image.device:
        phi = spare.copy_(phi)  # otherwise the CPU would convert it to floats first, in new memory
    image.copy_(phi).mul_(1.0 / ONE)
    # The subtraction is exact where theta has moved little.
    if keep_progress and theta.dtype in (torch.float32, torch.float64):
        theta.sub_(ref).add_(image)
    elif keep_progress:
        # In float32, from the old bf16 image of Phi to the new one: progress that is rounded on the way would
        # move theta at every apply, even where Phi has not changed.
        rounded = ref.to(theta.dtype)
        moved = spare.view(torch.float32).copy_(theta).sub_(rounded)
        theta.copy_(moved.add_(rounded.copy_(image)))
    else:
        theta.copy_(image)
    ref.copy_(image)
