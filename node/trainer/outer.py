"""The outer loop of one node: from inner progress to deltas, and from Phi to parameters.

Theory of operation
===================

A training loop does *inner steps*: forward, backward, the inner optimizer. After each one it calls
`Peer.step`, and that instant is a *step boundary*. All that this file does, it does there.

**State.** The model is cut into fragments; round ``r`` concerns fragment ``r % fragments``. Of each fragment
there are the live parameters `theta`, the reference `ref` (the float image of the Phi last applied, less this
node's deltas since), the error-feedback residual `e`, and the outer optimizer's buffers. The *window* of a
fragment is what the inner loop has done since this node's last delta of it.

**Publish.** The progress of a window is the pseudo-gradient; the outer optimizer turns it into a step; the
codec makes the step small; what the codec leaves out is carried into the next delta::

    g = ref - theta                     what training has done, as a gradient to subtract
    s = learning_rate * optimizer(g)    by default momentum in Nesterov's form
    x = s + ef_decay * e                in fixed point: integers, the same on every device
    payload = encode(x)
    e = x - decode(payload)
    theta = ref = ref - decode(payload)

So the node goes on from exactly what all others will decode. The optimizer is the sender's own; no state is
shared (see `outer_optimizers`). Which of the manifest's codecs to use, the daemon says. Where members take
turns (`protocol.sampling`), the learning rate is divided by the rounds between two turns, in which others'
windows move the model as far. When the rate changes, `e` is scaled with it, to stand for the same progress.

**Apply.** The daemon offers a newer Phi in shared memory whenever it has merged a round. The progress of the
open window stays on top of it::

    theta += Phi_new - ref;  ref = Phi_new

**Memory and time.** Both operations go through a fragment piece by piece, in memory that was made before
training began. On the CPU a piece stays in cache through all of its operations, and no page is touched for
the first time in the loop; small tensors are gathered into buckets. On a GPU nothing waits for the device
before the payload is complete. Nothing here does I/O or waits for the network: what the daemon wants and
offers is read from attributes that `DaemonLink`'s thread keeps up to date.

**A step boundary** (`Leader.step`): is a round due, by the pace and the swarm's clock? Which offers are to be
applied? Most steps have neither, and only count. Otherwise offers are applied first, and then the due
fragment is published. A share of a checkpoint is copied, and the parameters are marked, so that it can be
told later whether they are still as they are now. With several ranks (`ranks`), all of them agree on what
changes, and the first one does it for all.

**Failure.** There is one rule. If a publish or an apply fails, or is cut short by Ctrl-C, nothing on this
side is known to be whole: the open windows, residuals and buffers are dropped, one line is logged, the daemon
is asked for Phi again, and training goes on. A model that has diverged is one such failure: it shows at the
end of a publish, whose payload is then not handed over; its inner optimizer's state is cleared with the rest.
A delta that was handed over before stays handed over: `DaemonLink` sends it again to whatever daemon comes.

**Leaving** (`Leader.flush`). However a loop ends, by itself, by an error, a signal or the end of the process,
the last window is published, and the checkpoint saved, only if the parameters are as at the last step
boundary. They are not if an optimizer's step was cut short, or an evaluation has put other values into the
model. Where `--stop-within` gives time, the other fragments' windows follow, each as the swarm comes to its
round. When a stop is asked for, the loop's next step may be far away; so the window is published at once, by
the same rule, without waiting for the loop to leave (`Leader.publish_early`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as hiding_changes

from gossamer.node.home import Home
from gossamer.node.ipc import messages as control
from gossamer.node.trainer.checkpoint import CheckpointWriter, Progress, restore
from gossamer.node.trainer.daemon_link import DaemonLink, Offer
from gossamer.node.trainer.encoders import Bucket, PayloadWriter, piece_numel, together
from gossamer.node.trainer.genesis import vanishing
from gossamer.node.trainer.outer_optimizers import optimizer_of
from gossamer.node.trainer.parameters import check_fits
from gossamer.node.trainer.parts import Gathering, Part, Piece, Scratch, shaped
from gossamer.node.trainer.phi_updates import EvaluatedAverage, PhiUpdates
from gossamer.node.trainer.ranks import DONE, Rank, RankContext, Word
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError, DivergedError, LocalError
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT, Ints
from gossamer.protocol.limits import LOSS_MAX, OWN_TOKENS_MAX, STEPS_MAX, TOKENS_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import USUAL_STEPS, Pace
from gossamer.protocol.payloads import Fragment, section_starts
from gossamer.protocol.sampling import EVERY_ROUND, is_drawn

POLL_S = 0.01
REPORT_EVERY_S = 0.5
RATE_OVER_S = 2.0
"""Tokens per second are measured over this long."""

IDLE_TURNS = 2
"""How many times in a row all fragments may be published without a change before that is logged: a scaler
that skips its first steps, or a rate that is 0 at first, is no mistake."""

log = logging.getLogger("gossamer.peer")


# --- The state: fragments, in the parts in which they are processed (see `parts`).


@dataclass(slots=True)
class Window:
    """What the inner loop has done since this node's last delta of a fragment."""

    base: int
    """The round up to which the fragment was merged when the window began."""
    steps: int = 0
    tokens: int = 0
    loss: float | Tensor = 0.0
    """Sum over the steps, up to when any window was last closed; a loss on a device stays there."""
    changed: bool = False
    """Whether its outer step holds anything but zeros. Set when it is closed."""

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / max(1, self.steps)


@dataclass(slots=True)
class FragmentState:
    """One fragment's tensors, each list in the order of the fragment's slots. All memory is made, and its
    pages are touched, before training begins."""

    fragment: Fragment
    theta: list[Tensor]
    """The live parameters, whole."""
    ref: list[Tensor]
    """float32 image of the Phi last applied."""
    saved: dict[str, list[Tensor]]
    """What a checkpoint keeps, by kind: `residual`, what error feedback carries over (int32 fixed point), and
    what the outer optimizer keeps, float32, by its names."""
    parts: list[Part]
    starts: dict[str, list[int]]
    """Of the sections in its payloads, by codec."""
    window: Window
    rate: float
    """The learning rate of its last delta, by which the residual goes."""
    last_published: int = 0
    merged_round: int = 0

    @property
    def gpu(self) -> torch.device | None:
        """The CUDA device that holds all of it, if one does; other kinds of devices have not been tried."""
        devices = {part.device for part in self.parts}
        return device if len(devices) == 1 and (device := devices.pop()).type == "cuda" else None

    @classmethod
    def of(
        cls,
        fragment: Fragment,
        theta: list[Tensor],
        codecs: Sequence[str],
        buffers: Sequence[str],
        base: int,
        rate: float,
        scratch: Mapping[tuple[torch.device, torch.dtype], Scratch],
    ) -> "FragmentState":
        """The state as training begins; `base` is the base of the first window, `rate` the finest codec's."""
        ref = [torch.empty(0)] * len(theta)
        saved = {kind: list(ref) for kind in ("residual", *buffers)}
        parts: list[Part] = []
        starts = {codec: section_starts(CODECS[codec], fragment) for codec in codecs}
        cut = {place for place, slot in enumerate(fragment.slots) if slot.is_cut}
        begun = [
            tensor.detach().reshape(-1)[slot.strip] if slot.is_cut else tensor.detach()
            for tensor, slot in zip(theta, fragment.slots, strict=True)
        ]
        for places in map(sorted, together(codecs, begun, cut)):
            own = [begun[place] for place in places]
            device = own[0].device
            bucket = Bucket(starts, fragment, places, device) if len(own) > 1 else None
            numel = own[0].numel() if bucket is None else bucket.numel
            image, *kept = (torch.zeros(numel, dtype=torch.float32, device=device) for _ in ("", *buffers))
            rest = torch.zeros(numel, dtype=torch.int32, device=device)
            for rows, whole in zip((ref, *saved.values()), (image, rest, *kept), strict=True):
                for place, row in zip(places, shaped(whole, bucket, own), strict=True):
                    rows[place] = row
            torch._foreach_copy_([ref[place] for place in places], own)
            lost = [vanishing(ref[place]) for place in places]
            held = None if all(found is None for found in lost) else torch.zeros_like(image)
            if held is not None:
                for row, found in zip(shaped(held, bucket, own), lost, strict=True):
                    row.copy_(row if found is None else found)
            spare = scratch[device, own[0].dtype]
            small = None
            if bucket is not None:
                spare = spare.first(numel)
                values = shaped(spare.values, bucket, own)
                small = Gathering(bucket, [ref[i] for i in places], values, bucket.padded.of(spare.ints))
            size = piece_numel(codecs, image)
            spans = [slice(start, min(start + size, numel)) for start in range(0, numel, size)]
            pieces = [Piece(at, image[at], rest[at], tuple(row[at] for row in kept)) for at in spans]
            live, strip = [theta[place] for place in places], fragment.slots[places[0]].strip
            parts.append(Part(places, live, strip, image, held, pieces, spare, small))
        return cls(fragment, theta, ref, saved, parts, starts, Window(base), rate)


# --- The arithmetic.


class Sending(NamedTuple):
    """How a fragment's delta is made; `carried` is what the residual is multiplied by."""

    writer: PayloadWriter
    windows: float
    learning_rate: float
    carried: float


class OuterLoop:
    """The operations on the fragments of one model."""

    def __init__(self, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Bind to a model's parameters by name. Raises ConfigError naming the first that does not fit."""
        check_fits(tensors, manifest)
        self._rungs = manifest.outer.rungs
        self._optimizer = optimizer_of(manifest)
        pace = manifest.pace
        self._usual_steps = USUAL_STEPS if pace.is_set_by_swarm else pace.every_steps
        self.names = {tensor: name for name, tensor in tensors.items()}
        """The names of all the model's parameters."""
        fragments, codecs = manifest.plan().fragments, list(self._rungs)
        needed: dict[tuple[torch.device, torch.dtype], int] = {}
        for spec in manifest.layout.tensors:
            kind = tensors[spec.name].device, tensors[spec.name].dtype
            needed[kind] = max(needed.get(kind, 0), piece_numel(codecs, tensors[spec.name]))
        scratch = {kind: Scratch.of(numel, *kind) for kind, numel in needed.items()}
        self.fragments = [
            FragmentState.of(
                fragment,
                [tensors[slot.spec.name] for slot in fragment.slots],
                codecs,
                self._optimizer.buffers,
                # The round before the first one that publishes it.
                index - len(fragments) if index else 0,
                manifest.outer.codecs[0].learning_rate,
                scratch,
            )
            for index, fragment in enumerate(fragments)
        ]
        self._device_types = {"cpu", *(part.device.type for state in self.fragments for part in state.parts)}
        self._loss: float | Tensor = 0.0
        """Sum over the steps since a window was last closed. On a device each addition is a call, so a step
        adds to this one number, however many windows there are."""

    @property
    def has_open_windows(self) -> bool:
        """Whether any fragment has trained since it was last published."""
        return any(state.window.steps for state in self.fragments)

    def step(self, tokens: int, loss: float | Tensor) -> None:
        """Record one inner step in every fragment's window."""
        if isinstance(loss, Tensor):
            # In float32, since a growing sum in bf16 stops changing.
            loss = loss.item() if loss.is_cpu else loss.detach().float()
        self._loss = self._loss + loss
        for state in self.fragments:
            state.window.steps += 1
            state.window.tokens += tokens

    def apply(self, index: int, phi: Ints | Tensor, merged_round: int, *, keep_progress: bool = True) -> None:
        """Move a fragment to a newer Phi, keeping local progress unless told not to.

        `phi`: int32[fragment.numel], on the CPU or on the fragment's device, which is then not waited for.

        Where Phi is 0, values that only fixed point made 0 (an epsilon of 1e-8) stay what they were. They are
        added to `ref` too, so that they are no progress.
        """
        state = self.fragments[index]
        state.merged_round = merged_round
        phi = phi if isinstance(phi, Tensor) else torch.from_numpy(phi)
        phis = {device: phi.to(device) for device in {part.device for part in state.parts}}
        with self._exactly():
            for part in state.parts:
                values, image = part.values(), part.phi(phis[part.device], state.fragment)
                for piece in part.pieces:
                    _take_over(image[piece.span], values[piece.span], piece.ref, part.scratch, keep_progress)
                if part.vanishing is not None:
                    held = part.vanishing * (part.ref == 0)
                    part.ref.add_(held)
                    values.add_(held)
                part.write_back(values)
        if not keep_progress:
            self._begin_window(state, merged_round)
        elif state.window.steps == 0:
            state.window.base = max(state.window.base, merged_round)

    def reset(self) -> None:
        """Set all parameters to the Phi last applied, and begin all windows again."""
        with self._exactly():
            for state in self.fragments:
                self._begin_window(state, state.merged_round)
                for part in state.parts:
                    part.go_to_ref()

    def forget(self) -> None:
        """Set all residuals and buffers to 0: they may be half updated, or hold values that are not
        finite."""
        for state in self.fragments:
            for kept in state.saved.values():
                for tensor in kept:
                    tensor.zero_()

    def publish(
        self, index: int, round_: int, out: memoryview, codec: str = "", turn: int = EVERY_ROUND
    ) -> tuple[int, Window]:
        """Close a fragment's window and write its payload to `out`, in a codec of the manifest's, by default
        the finest; returns its length and the window. `turn`: see `sampling.is_drawn`.

        Raises DivergedError if training left the range of fixed point. The payload is then worth nothing, nor
        is the fragment's state: load it again, without its progress.
        """
        state = self.fragments[index]
        rung = self._rungs[codec or next(iter(self._rungs))]
        # While our window was open, so many rounds have moved Phi by as much as ours does now.
        rate, before = rung.learning_rate * EVERY_ROUND / turn, state.rate
        state.rate = rate
        writer = PayloadWriter(rung.name, state.starts[rung.name], out)
        # Windows that are counted in seconds are all alike: a slow machine does what it can in one.
        windows = state.window.steps / self._usual_steps if self._usual_steps else 1.0
        sending = Sending(writer, windows, rate, rung.ef_decay * rate / before)
        extents: list[tuple[Part, tuple[Tensor, Tensor]]] = []
        with self._exactly():
            for part in state.parts:
                values = part.values()
                extents += [
                    (part, self._send(values[piece.span], part, piece, sending)) for piece in part.pieces
                ]
                if part.small is None:
                    part.write_back(values)
            length = writer.finish()  # from here on, nothing has to be waited for
            changed = False
            for part, extent in extents:
                step, end = map(float, extent)
                changed = changed or step > 0
                if not (step < VALUE_LIMIT and end * ONE < VALUE_LIMIT):  # also if one is NaN
                    raise DivergedError(
                        f"{_named(state, part)} is not finite, moved by over 64, or is beyond 64, the"
                        " limit of a swarm's numbers: lower the learning rate, or rescale what it learns (the"
                        " targets, say)"
                    )
            for part in state.parts:
                if part.small is not None:  # only now: until here they show which of them has diverged
                    part.go_to_ref()
        closed = self._begin_window(state, round_)
        closed.changed = changed
        closed.base = min(closed.base, round_ - len(self.fragments))
        state.last_published = round_
        return length, closed

    def _send(self, theta: Tensor, part: Part, piece: Piece, sending: Sending) -> tuple[Tensor, Tensor]:
        """Encode a piece's step, and set the parameters, if not a bucket's, to what all others will decode.

        Returns how far the step goes, in units of fixed point, and the largest value where it ends: both
        float32 [] on the piece's device.
        """
        span, ref, residual, buffers = piece
        step, sent, _ = part.scratch.first(ref.numel())
        if theta.dtype == torch.float32:
            torch.sub(ref, theta, out=step)
        else:
            # What bf16 cannot hold of `ref` is not progress: `theta` began at the bf16 image of `ref`.
            step.copy_(ref.to(theta.dtype)).sub_(theta.float())
        self._optimizer.step(step, *buffers, windows=sending.windows)
        step.mul_(sending.learning_rate * ONE).round_()
        longest = _magnitude(step)
        if sending.carried != 1.0:
            scaled = residual.float().mul_(sending.carried).round_()
            residual.copy_(scaled.clamp_(-VALUE_LIMIT, VALUE_LIMIT))
        residual.add_(sent.copy_(step)).clamp_(1 - VALUE_LIMIT, VALUE_LIMIT - 1)
        sending.writer.write(part.places, part.small and part.small.bucket, span.start, residual, sent)
        residual.sub_(sent)
        ref.sub_(step.copy_(sent), alpha=1.0 / ONE)  # scaling by a power of two is exact
        if part.small is None:
            theta.copy_(ref)
        return longest, _magnitude(ref)

    def _begin_window(self, state: FragmentState, base: int) -> Window:
        """Close a fragment's window, and begin the next; returns the closed one."""
        for other in self.fragments:
            other.window.loss = other.window.loss + self._loss
        self._loss = 0.0
        closed = state.window
        state.window = Window(max(base, closed.base, state.merged_round))
        return closed

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """Inside, torch computes what is written, whatever modes the script's loop has set: without gradients
        and autocast, which to bf16 would refuse fp16 parameters. It uses one core: on a busy machine, each of
        thousands of short operations would wait until all its threads have had their turn."""
        threads = torch.get_num_threads()
        with torch.no_grad(), ExitStack() as modes:
            modes.callback(torch.set_num_threads, threads)
            torch.set_num_threads(1)
            for device in filter(torch.amp.is_autocast_available, self._device_types):
                modes.enter_context(torch.autocast(device, enabled=False))
            yield


def _named(state: FragmentState, part: Part) -> str:
    """The tensor of a part that is to blame, for a person; all of a bucket if it is not among its values."""
    names = [state.fragment.slots[place].spec.name for place in part.places]
    if part.small is not None:
        rows = zip(names, part.theta, strict=True)
        names = [name for name, row in rows if not float(_magnitude(row)) * ONE < VALUE_LIMIT][:1] or names
    return f"tensor {names[0]!r}" if len(names) == 1 else f"a tensor (one of {', '.join(names):.200})"


def _magnitude(values: Tensor) -> Tensor:
    """The largest magnitude, float32 []; NaN if any value is. Two reductions are faster than `aminmax`, and
    many times as fast as a norm."""
    return torch.maximum(values.amax(), values.amin().neg_())


def _take_over(phi: Tensor, theta: Tensor, ref: Tensor, scratch: Scratch, keep_progress: bool) -> None:
    """Move one piece to a newer Phi, int32."""
    image, spare, _ = scratch.first(ref.numel())
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


# --- The driver: what the outer loop does at a step boundary, and when the node leaves.


class Leader(Rank):
    """Drives the outer loop of one node. Of several ranks, it is the first; the others are plain `Rank`s."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        manifest: Manifest,
        link: DaemonLink,
        context: RankContext,
        checkpoint: Path,
    ) -> None:
        """Raises ConfigError if the model does not fit the manifest."""
        super().__init__(model, manifest, link.node_id, context)
        self._link = link
        self._optimizers = tuple(optimizers)
        self._saved_optimizers = self._optimizers if self.team.size == 1 else ()
        self._checkpoint_path = checkpoint
        self._checkpoint = CheckpointWriter(checkpoint)
        tensors = self.team.bind(manifest.plan())
        self._outer = OuterLoop(tensors, manifest)
        states = self._outer.fragments
        self._updates = PhiUpdates(link, manifest.plan().fragments, [state.gpu for state in states])
        self._pace = Pace(manifest.pace, manifest.layout.fragments, link.node_id)
        self._missing = set(range(len(states)))
        """Fragments that have to be loaded from the daemon, without local progress: at first, and after a
        change that failed."""
        self._has_diverged = False
        """Whether the model diverged, and the swarm's has not been loaded since."""
        self._shared = tuple(tensor for state in states for tensor in state.theta)
        self._boundary = self.team.boundary(self._shared)
        self._evaluated = EvaluatedAverage(Home(checkpoint.parent), tensors, self._boundary)
        self._extra_stop_s = context.extra_stop_s
        self._clock = 0
        """The swarm's clock as it last went past our last round."""
        self._steps_since = 0
        """Since then, or since our last delta."""
        self._turn = EVERY_ROUND
        """By which the round to publish was chosen."""
        self._since = time.monotonic()
        self._window_loss = 0.0
        """Mean loss of the last published window with a finite one. It becomes `last_loss` once all ranks
        know it."""
        self._empty = 0
        """Empty deltas since the last one that held something."""
        self._reported_at = 0.0
        self._measured: tuple[float, int] | None = None
        """When the speed was last measured, and the tokens at that time; None before training begins."""
        self._tokens_per_s = 0.0

    @property
    def seen(self) -> Word:
        return self._word if self.team.size > 1 else self._now()

    @property
    def is_outdated(self) -> bool:
        return self._link.is_outdated

    @property
    def _must_stop(self) -> bool:
        return self._link.stop_asked.is_set() or super()._must_stop

    # -- what the loop does

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        while self._missing and not self.should_stop:
            if not self._apply_all():
                time.sleep(POLL_S)
                if on_wait is not None:
                    on_wait()
        restored = restore(self._checkpoint_path, self._outer, self._saved_optimizers)
        if restored is not None:
            self.progress, self.resumed = restored
            if self.team.size > 1 and self.progress.steps:
                log.info("with several ranks, the inner optimizer's state is not kept: it starts afresh")
        word = self._agree(done=DONE)
        self.begun_at = time.perf_counter()
        self._since = time.monotonic()
        return not self._missing and not (word.stop and self.team.size > 1)

    def step(self, tokens: int, loss: float | Tensor) -> int | None:
        begun = time.perf_counter()
        try:
            round_ = self._step(tokens, loss)
        except LocalError:  # refused before anything has changed, or another rank is gone
            raise
        except BaseException as error:  # Ctrl-C, or whatever a signal's handler raises
            self._drop(error)
            raise
        self.outer_s += time.perf_counter() - begun
        return round_

    def _step(self, tokens: int, loss: float | Tensor) -> int | None:
        self._learn_taken()
        round_ = None if self._missing else self._due()
        offers = self._updates.all() if self._missing else self._offers(round_)
        touched = self._touched(offers, round_)
        if self.team.size > 1:
            tokens = self._agree(touched, tokens=tokens, round_=round_ or 0).tokens
        self._outer.step(tokens, loss)
        so_far = min(self.progress.tokens + tokens, OWN_TOKENS_MAX)
        self.progress = Progress(self.progress.steps + 1, so_far)
        self._steps_since += 1
        if self.draws is not None:
            self.draws.stepped(self.progress.steps)
        if touched:
            round_ = self._change(touched, offers, round_)
        if not self._missing:
            self._checkpoint.step(self._outer, self._saved_optimizers, self.progress)
        self._boundary.mark()
        return round_

    def await_daemon(self, timeout_s: float) -> None:
        self.stop_requested = False
        deadline = time.monotonic() + timeout_s
        while self._outer.has_open_windows and not self.finished and not self._link.is_attached:
            if self._must_stop or time.monotonic() >= deadline:
                return
            time.sleep(POLL_S)

    def publish_early(self, timeout_s: float) -> bool:
        if self.team.size > 1 or self._missing or not self._boundary.holds:
            return False
        round_ = self._due_at_the_end(timeout_s)
        if round_ is not None:
            try:
                touched = self._touched([], round_)
            except ConfigError:  # which the next step raises
                return False
            # A forward pass may be under way. Its backward pass would refuse parameters that have changed.
            with hiding_changes(self._shared):
                round_ = self._change(touched, [], round_)
            self._boundary.mark()
        if round_ is not None:
            log.info("asked to stop: what this node has learnt is published, as round %d", round_)
        return True

    def flush(self, timeout_s: float) -> None:
        self.stop_requested = False
        while self._agree(leaving=1).leaving < self.team.size:
            pass  # a rank that still trains hears of it at its next step
        gives_up_at = time.monotonic() + timeout_s
        is_whole = not self._missing and self._boundary.holds
        if not is_whole and not self._missing:
            log.warning(
                "the parameters are not as peer.step last left them (a step was cut short, an evaluation uses"
                " other values, or step was never called), so what has changed since is not published"
            )
        waits_until = time.monotonic() + self._extra_stop_s
        gives_up_at += self._extra_stop_s
        round_ = self._due_at_the_end(timeout_s / 2) if is_whole else None
        while True:
            touched = self._touched([], round_)
            self._agree(touched, round_=round_ or 0)
            self._change(touched, [], round_)
            if round_ is None:
                break
            round_ = self._next_at_the_end(waits_until)
        if is_whole and not self._missing:
            self._checkpoint.save(self._outer, self._saved_optimizers, self.progress)
            self._boundary.mark()
        if not self._link.wait_acknowledged(gives_up_at - time.monotonic()):
            log.warning(
                "the node's daemon has yet to store the delta of round %d, which is lost if the node ends"
                " before",
                self._link.own_last,
            )

    def drop_progress(self) -> None:
        self._binding.check(always=True)  # parameters that a script has replaced are not the swarm's
        everything = frozenset(range(len(self._outer.fragments)))
        self._agree(everything)
        with self.team.full(everything):
            self._outer.reset()
        if self.draws is not None:
            self.draws.dropped()
        self._steps_since = 0
        self._boundary.mark()

    def settle(self) -> bool:
        has_changed = self._apply_all()
        is_waiting = self._link.unmerged > 0 or not self._link.can_publish
        return has_changed or is_waiting or bool(self._missing)

    def agree_done(self, done: int) -> int:
        return self._agree(done=done).done

    def report(self, state: str, evaluation: control.Evaluation = control.NOT_EVALUATED) -> None:
        now, tokens = time.monotonic(), self.progress.tokens
        if now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        if state != control.JOINING:
            since, before = self._measured or (now, tokens)  # of this run: `tokens` includes earlier ones
            if now - since > RATE_OVER_S:
                self._tokens_per_s = (tokens - before) / (now - since)
                since, before = now, tokens
            self._measured = since, before
        self._link.send(
            control.Report(
                state,
                self.progress.steps,
                tokens,
                self._tokens_per_s,
                self.last_loss,
                *evaluation,
                self.wait_fraction,
                self.team.device,
            )
        )

    def close(self) -> None:
        try:
            self._updates.close()
            self._checkpoint.close()
            self._link.close()
        finally:
            super().close()

    # -- a change of the parameters

    def _now(self, round_: int = 0) -> Word:
        """What this rank has to tell the others at any time; `round_` is published now."""
        return Word(
            stop=int(self._must_stop),
            own_last=max(self._link.own_last, round_),
            clock=self._link.clock,
            swarm_tokens=self._link.swarm_tokens,
            links=self._link.links,
            version=self.version,
            applied=self.applied,
            steps=self.progress.steps,
            own_tokens=self.progress.tokens,
            loss=self._window_loss,
        )

    def _agree(
        self,
        touched: frozenset[int] = frozenset(),
        *,
        tokens: int = 0,
        leaving: int = 0,
        done: int = 0,
        round_: int = 0,
    ) -> Word:
        """Agree with the other ranks on what happens now."""
        now = self._now(round_)
        self._word = self.team.agree(now._replace(touched=touched, tokens=tokens, leaving=leaving, done=done))
        self._share_draws(self._word)
        self.last_loss = self._word.loss
        return self._word

    def _offers(self, round_: int | None) -> list[Offer]:
        """The offers to apply at a step. Those without our own last delta are dropped: they would undo it for
        a moment."""
        offers = []
        for offer in self._updates.for_step(round_):
            if offer.own_round >= self._outer.fragments[offer.fragment].last_published:
                offers.append(offer)
            else:
                self._updates.done(offer)
        return offers

    def _touched(self, offers: Sequence[Offer], round_: int | None) -> frozenset[int]:
        """The fragments that are about to change. Raises ConfigError if the model's parameters are others."""
        touched = {offer.fragment for offer in offers}
        if round_ is not None:
            touched.add(round_ % len(self._outer.fragments))
        if touched:
            self._binding.check()
        if offers:
            # Offers come in order, so the last is the newest; a restarted daemon counts from 0 again.
            self.version, self.applied = offers[-1].version, self.applied + 1
        return frozenset(touched)

    def _change(self, touched: frozenset[int], offers: Sequence[Offer], round_: int | None) -> int | None:
        """Apply and publish. Returns the round, if it was published. A failure drops the open windows."""
        with self.team.full(touched):
            try:
                for offer in offers:
                    self._apply(offer)
                if round_ is not None:
                    self._publish(round_)
            except Exception as error:
                self._drop(error)
                return None
        return round_

    def _drop(self, error: BaseException) -> None:
        """A change failed or was cut short: begin again with the swarm's model, as the daemon has it."""
        if isinstance(error, Exception):
            kind = "" if isinstance(error, DivergedError) else f"{type(error).__name__}: "
            log.warning(
                "%s%s. What this node has learnt since its last delta is dropped; it goes on from the swarm's"
                " model",
                kind,
                error,
            )
        self._has_diverged = self._has_diverged or isinstance(error, DivergedError)
        self._missing = set(range(len(self._outer.fragments)))
        self._outer.forget()
        self._updates.forget()
        if self.draws is not None:
            self.draws.dropped()
        self._link.reconnect()

    def _apply_all(self) -> bool:
        """Outside of steps: apply all there is. Returns whether there was any."""
        self._learn_taken()
        offers = self._updates.all()
        touched = self._touched(offers, None)
        self._agree(touched)
        self._change(touched, offers, None)
        self._boundary.mark()
        return bool(offers)

    def _learn_taken(self) -> None:
        """Before changes: what the daemon says of the data."""
        if self.draws is not None and (taken := self._link.taken) is not self.draws.taken and taken:
            self.draws.learn(taken)

    def _apply(self, offer: Offer) -> None:
        """Move to the Phi offered, with the progress of the open window on top, unless that was dropped."""
        state, is_missing = self._outer.fragments[offer.fragment], offer.fragment in self._missing
        phi = self._updates.values(offer)
        self._outer.apply(offer.fragment, phi, offer.merged_round, keep_progress=not is_missing)
        self._updates.done(offer)
        if is_missing:
            state.last_published = max(state.last_published, offer.own_round)
            self._missing.remove(offer.fragment)
            if self._has_diverged and not self._missing:
                for optimizer in self._optimizers:
                    optimizer.state.clear()  # a momentum that is not finite would spoil the model again
                self._has_diverged = False

    def _publish(self, round_: int) -> None:
        area, fragments = self._link.payload_area, len(self._outer.fragments)
        codec = self._link.codec
        length, window = self._outer.publish(round_ % fragments, round_, area, codec, self._turn)
        self._empty = 0 if window.changed else self._empty + 1
        if self._empty == IDLE_TURNS * fragments:
            # It trains a copy of the model, say, or one that a notebook has created again.
            log.warning(
                "no parameter has changed for %d rounds, so nothing is published: does the optimizer train"
                " this model, at a learning rate above 0?",
                self._empty,
            )
        # The loss is only for displays: one that overflowed (float16 before its scaler has settled) must not
        # cost the delta.
        loss = window.mean_loss
        if isfinite(loss):
            self._window_loss = max(-LOSS_MAX, min(LOSS_MAX, loss))
        if self.team.size == 1:  # several ranks hear of it with the next word
            self.last_loss = self._window_loss
        epoch, blocks = 0, b""
        if self.draws is not None:
            open_steps = max(state.window.steps for state in self._outer.fragments)
            epoch, blocks = self.draws.claim(self.progress.steps - open_steps)
        self._link.publish(
            control.Publish(
                round=round_,
                base=window.base,
                tokens=min(window.tokens, TOKENS_MAX),
                steps=min(window.steps, STEPS_MAX),
                loss=self._window_loss,
                codec=codec,
                payload_bytes=length,
                epoch=epoch,
                blocks=blocks,
                turn=self._turn,
            ),
            area,
        )
        self._steps_since = 0
        self._since = time.monotonic()

    # -- what is due

    def _due(self) -> int | None:
        """The round to publish at this step, if any."""
        if not self._link.can_publish:
            return None
        link, now = self._link, time.monotonic()
        if link.own_last < link.clock != self._clock:
            self._clock, self._steps_since, self._since = link.clock, 0, now
        steps, seconds, self._turn = self._steps_since + 1, now - self._since, link.turn
        round_ = self._pace.due(link.own_last, link.clock, steps, seconds, link.window, self._turn)
        return None if round_ is not None and 0 < self._stop_round < round_ else round_

    def _due_at_the_end(self, timeout_s: float) -> int | None:
        """The round to publish before leaving, however short its window; waits until the last delta is
        acknowledged, when this one can be handed over.

        None if the window holds no step, or if the swarm has not come to that round yet.
        """
        if self.finished or not self._outer.has_open_windows:
            return None
        self._link.wait_acknowledged(timeout_s, only_attached=True)
        if not self._link.can_publish:
            log.warning(
                "what this node has learnt since its last delta is not published: its daemon %s",
                "has yet to store that one" if self._link.is_attached else "does not answer",
            )
            return None
        return self._openable()

    def _next_at_the_end(self, until: float) -> int | None:
        """The next round to publish before leaving: another fragment's window, as the swarm comes to its
        round. Where we alone move the swarm's clock, its rounds follow each other at their minimum length.

        None if no window is left, or at `until`.
        """
        while time.monotonic() < until and not (self.finished or self._missing):
            if not self._outer.has_open_windows:
                break
            is_timely = time.monotonic() - self._since >= self._pace.section.min_round_seconds
            if is_timely and self._link.can_publish and (round_ := self._openable()) is not None:
                return round_
            time.sleep(POLL_S)
        return None

    def _openable(self) -> int | None:
        """The next round whose window holds a step, if the swarm has come to that round."""
        # The clock may be unknown, after a sleep. Then the window's delta is published however late it is.
        clock = self._link.clock if self._link.clock >= 0 else self._link.own_last
        windows = [state.window for state in self._outer.fragments]
        rounds = range(max(self._link.own_last + 1, clock), clock + 2)
        node_id, self._turn = self._link.node_id, self._link.turn
        open_ = (round_ for round_ in rounds if windows[round_ % len(windows)].steps > 0)
        return next((round_ for round_ in open_ if is_drawn(node_id, round_, self._turn)), None)
