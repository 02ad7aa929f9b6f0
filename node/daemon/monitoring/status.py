"""`NodeStatus`: all that is shown of a node, made once a second.

From it come the JSON of ``/gossamer/1/status``, the page's state, the metrics for Prometheus, the health
checks, and what `gossamer status`, `peers` and `top` show. To add a figure, add a field here, and set it in
`Monitor.read`. With a `metric`, Prometheus gets it; with `local`, it never leaves this machine.

Ids and digests are in hex, times and durations in seconds, sizes in bytes, in fields and in JSON alike.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from math import isfinite
from typing import Any

from gossamer.node.formatting import both_losses
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.membership.members import Health
from gossamer.protocol.records import Claim

LIVE = (Health.ALIVE, Health.SUSPECT)
STATES = ("joining", "starting", "training", "serving", "finished", "leaving")


@dataclass(frozen=True, slots=True)
class Metric:
    """The Prometheus series of a field."""

    name: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that tell this field from others of the same name."""
    label: str = ""
    """The label by which the values of a collection are counted; empty if the field is a number."""
    values: tuple[str, ...] = ()
    of: Callable[[Any], Any] = lambda value: value
    """The number in a field's value or, with `label`, the label values in it, or how often each is in it."""


def metric(name: str, help_: str, **more: Any) -> Any:
    """A field that Prometheus gets as ``gossamer_{name}``, see
    https://prometheus.io/docs/practices/naming/."""
    return field(metadata={"metric": Metric(f"gossamer_{name}", help_, **more)})


def link_bytes(**labels: str) -> Any:
    return metric("link_bytes_total", "Bytes of all links.", labels=labels)


def local(**metadata: Any) -> Any:
    """A field that other nodes are not told."""
    return field(metadata={"local": True, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member, or this node itself: what it says of itself, and what we have seen of it."""

    node_id: str
    name: str
    health: str
    trains: bool
    role: str
    """"train" or "observe": what it does, as far as it may."""
    round: int
    tokens: int
    tokens_per_s: float
    """0 if it is gone."""
    loss: float | None
    fresh: float | None
    """The part of its last window in which it trained on what the others had published for the one before."""
    codec: str | None
    """Of its latest delta here."""
    device: str
    release: str
    addresses: tuple[str, ...]
    dialled: tuple[str, ...]
    """The first 4 bytes of the ids of the nodes that it has dialled."""
    heard_s: float
    """How long ago there was a sign of life."""
    downs: int
    """How often it was found to be down."""
    replica: str | None
    """How its snapshot compares with ours, see `Likeness`; None if they cannot be compared."""
    replica_round: int | None
    contributions: Mapping[str, Any]
    """What its deltas were like lately, see `contributions.Summary`."""

    @property
    def label(self) -> str:
        """How it is called in messages to people."""
        return f"{self.name} ({self.node_id[:8]})" if self.name else self.node_id[:8]

    @property
    def is_live(self) -> bool:
        return self.health in LIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """A link, and the bytes that it has carried: messages, and apart from these the chunks of payloads and
    snapshots."""

    node_id: str
    outbound: bool
    sent: int
    received: int
    payload_sent: int
    payload_received: int
    dropped: int
    """Messages that were dropped because the other side reads too slowly."""
    throttled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """The trainer's last report."""

    state: str
    device: str
    inner_steps: int | None = metric("inner_steps", "Inner steps of this node's trainer, over all runs.")
    """None while it joins: its checkpoint is read only then."""
    tokens: int | None = metric("tokens", "Tokens that this node has trained on, over all runs.")
    tokens_per_s: float = metric("tokens_per_second", "Speed of this node's trainer.")
    loss: float | None = metric("training_loss", "Training loss of this node's latest step.")
    val_loss: float | None = metric(
        "validation_loss", "Held-out loss of the live model at the last evaluation."
    )
    val_loss_average: float | None = metric(
        "validation_loss_average", "Held-out loss of the averaged model at the last evaluation."
    )
    """None also if only the live model was evaluated, as while the averaged one is not here yet."""
    val_loss_start: float | None
    val_version: int
    val_round: int
    wait_fraction: float = metric("wait_ratio", "Fraction of training time not spent on inner steps.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStatus:
    """How far the swarm is with the data that it goes through together. Shares of the samples."""

    epoch: int = metric("data_epoch", "Epoch of the swarm's data, from 0.")
    seen_once: float = metric("data_seen_once_ratio", "Share of the data trained on once in this epoch.")
    seen_again: float = metric("data_seen_again_ratio", "Share that was claimed again in this epoch.")
    not_seen: float = metric("data_not_seen_ratio", "Share that nobody has trained on in this epoch yet.")
    before_seen: float | None
    """Of the epoch before: trained on at all; None in the first."""
    before_seen_again: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What only the health checks need."""

    late_s: float
    """How much later than planned the last look was: the event loop was busy for so long."""
    files_free: int
    """How many more files fit on the disk."""
    is_ready: bool
    """Whether all that was published before we started is merged."""
    has_model: bool
    known_addresses: int
    """Addresses that lead, or once led, to others."""
    refusal: str
    """Why members no longer let this node in, by the credentials that it knows."""
    fetched_bytes: int
    missing_is_held: bool
    """Whether a linked node says that it holds some of what is missing here."""
    diverged: str
    """What is out of range in the model, if anything is."""
    clock_offsets: tuple[float, ...]
    """How many seconds the clocks of peers are ahead of ours."""
    clock_contradicted: bool
    """Whether most others are at rounds that are not possible yet by our clock."""
    has_trainer: bool
    trainer_starts: int
    """How many trainers have come."""
    step_overdue_s: float
    """How much later than usual the trainer's next step is, if it has one to do."""
    own_void: int
    """In how many rounds our own deltas are void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node at one moment."""

    time: float
    """Unix seconds."""
    swarm_id: str
    swarm: str
    model: Mapping[str, Any]
    """What the swarm trains, and how, by its manifest: task, parameters, tensors, fragments, codec,
    averaging, pace, admission."""
    node_id: str
    name: str
    trains: bool
    release: str
    folder: str = local()
    addresses: tuple[str, ...]
    """Where we say that we can be dialled."""
    reachable: bool
    """Whether others have dialled us there."""
    invited_until: int | None = metric(
        "invited_until_timestamp_seconds", "When this node's invitation ends, in Unix time."
    )
    state: str = metric(
        "state", "1 for the node's current state.", label="state", values=STATES, of=lambda state: (state,)
    )
    problem: str | None = local(
        metric=Metric(
            "gossamer_healthy", "1 if the node is healthy, see /healthz.", of=lambda found: not found
        )
    )
    """Why the node is not healthy; None if it is."""
    uptime_s: float = metric("uptime_seconds", "Time since the daemon started.")

    # -- the swarm's history
    round: int = metric("round", "Last round that this node published a delta for.")
    clock: int = metric("swarm_round", "Round clock of the swarm.")
    codec: str = metric(
        "codec",
        "1 for the codec of this node's deltas.",
        label="codec",
        values=tuple(CODECS),
        of=lambda one: (one,),
    )
    codec_why: str
    """Why that last changed, in words; empty if it has not."""
    records: int = metric("records", "Delta records held.")
    ledger_digest: str
    void: tuple[Mapping[str, Any], ...] = metric("void_records", "Rounds of members that are void.", of=len)
    sealed_round: int | None = metric("sealed_round", "Round of this node's newest snapshot.")
    sealed_digest: str | None
    """Root of that snapshot's bytes."""
    closed_round: int = metric("closed_round", "Rounds up to this one cannot change any more.")
    fetching: tuple[int, int] | None
    """Chunks here, and chunks in all, of the snapshot that is being fetched."""
    payloads_missing: int = metric("payloads_missing", "Payloads that are known of but not fetched yet.")
    version: int = metric("merges_total", "Merges that changed the model.")
    rounds_behind: int = metric("rounds_behind", "Rounds that have changed and wait to be merged.")
    merge_s: float = metric("merge_seconds_total", "Wall time spent merging.")
    swarm_tokens: int | None = metric("swarm_tokens", "Tokens that the swarm has trained on.")
    """None until all that was here at the start is merged: the sum is built up again."""
    window: int = metric("window_steps", "Inner steps in a window; 0 where windows are counted in seconds.")
    turn: float = metric("rounds_per_turn", "One in how many rounds a member contributes to, on average.")
    window_why: str
    """When and why that last changed, in words; empty if it has not."""
    agreement: float | None = metric(
        "agreement_ratio", "Mean cosine of pairs of deltas in the newest round with two deltas, -1 to 1."
    )
    data: DataStatus | None
    """None if nodes have data of their own."""

    # -- the others
    itself: MemberStatus
    by_health: Mapping[str, int] = metric(
        "members",
        "Other members, by their health as this node sees it.",
        label="health",
        values=tuple(Health),
    )
    replicas: Mapping[str, int]
    """Other live members by how their replica compares with ours (`Likeness`); "unknown" if it cannot be
    compared."""
    same_at: tuple[int, int]
    """The oldest and the newest round at which replicas are the same; 0 if none are."""
    swarm_tokens_per_s: float = metric("swarm_tokens_per_second", "Speed of all live trainers together.")
    members: tuple[MemberStatus, ...]
    """Some of the others, those first that matter most (`members.Rank`): see `members.LISTED`."""
    members_accused: int = metric("members_accused", "Members whose deltas are usually bad.")
    links: tuple[LinkStatus, ...] = metric(
        "links",
        "Links, by which side dialled.",
        label="direction",
        values=("inbound", "outbound"),
        of=lambda links: ("outbound" if link.outbound else "inbound" for link in links),
    )
    bytes_sent: int
    bytes_received: int
    payload_bytes_sent: int = link_bytes(direction="sent", kind="payload")
    payload_bytes_received: int = link_bytes(direction="received", kind="payload")
    control_bytes_sent: int = link_bytes(direction="sent", kind="control")
    control_bytes_received: int = link_bytes(direction="received", kind="control")
    misbehaviours_seen: int = metric("misbehaviours_total", "Messages that broke the protocol.")
    throttled: int
    greylisted: int
    turned_away: int
    listener: Mapping[str, Any]
    """Accepted and refused connections."""

    # -- this machine
    trainer: TrainerStatus | None
    tasks: int
    """asyncio tasks of the daemon."""
    lag_s: float = metric(
        "event_loop_lag_seconds", "Longest time in the last minute that the daemon's event loop was busy."
    )
    disk_free: int = local(
        metric=Metric(
            "gossamer_disk_free_bytes",
            "Free space on the disk of the node's folder or of its chunks, whichever has less.",
        )
    )
    vitals: Vitals = field(metadata={"local": True})

    @property
    def live(self) -> int:
        """Other members believed to be up."""
        return sum(self.by_health.get(health, 0) for health in LIVE)


# --- JSON


def to_json(status: Any, *, is_for_others: bool = False) -> dict[str, Any]:
    """A status as JSON has it. Others are not told the `local` fields."""
    found = {}
    for name, is_local in _names(status.__class__):
        if not (is_local and is_for_others):
            found[name] = _plain(getattr(status, name), is_for_others)
    return found


def _plain(value: Any, is_for_others: bool) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return None  # JSON cannot express it
    if isinstance(value, tuple):
        return [_plain(each, is_for_others) for each in value]
    return to_json(value, is_for_others=is_for_others) if is_dataclass(value) else value


@cache
def _names(kind: Any) -> tuple[tuple[str, bool], ...]:
    return tuple((each.name, "local" in each.metadata) for each in fields(kind))


def metrics_of(status: Any) -> Iterable[tuple[Metric, Any]]:
    """The metrics of a status, and of those in its fields, with their values."""
    each: Field[Any]
    for each in fields(status):
        value = getattr(status, each.name)
        if "metric" in each.metadata:
            yield each.metadata["metric"], value
        elif is_dataclass(value):
            yield from metrics_of(value)


def one_line(status: Mapping[str, Any]) -> str:
    """A status, as JSON has it, in one line for a person."""
    trainer = status.get("trainer") or {}
    loss = f", loss {trainer['loss']:.3f}" if trainer.get("loss") else ""
    if held_out := both_losses(trainer.get("val_loss_average"), trainer.get("val_loss")):
        loss += f", held-out {held_out}"
    live = int(status["by_health"].get("alive", 0))
    links = len(status["links"])
    reach = f"{live} peer{'s' * (live != 1)} alive, {links} link{'s' * (links != 1)}"
    name = status["name"] or status["node_id"][:8]
    # A node that does not train publishes nothing, and its own round would stay 0 for ever.
    at = f"{status['round']} (swarm {status['clock']})" if status["trains"] else f"{status['clock']}"
    return f"{name}: {status['state']}, round {at}{loss}, {reach}"


def unlisted(status: Mapping[str, Any]) -> int:
    """How many members are not in a status, as JSON has it, one by one."""
    return max(0, sum(map(int, status["by_health"].values())) - len(status["members"]))


def data_in_words(data: Mapping[str, Any]) -> str:
    """How far the swarm is with its data, as JSON has it, for a person."""
    shares = (f"{100 * data[name]:.1f} %" for name in ("seen_once", "seen_again", "not_seen"))
    now = "epoch {} of the data: {} seen once, {} again, {} not yet".format(data["epoch"], *shares)
    if data["before_seen"] is None:
        return now
    before, again = 100 * data["before_seen"], 100 * data["before_seen_again"]
    return f"{now}; in the epoch before {before:.1f} % were seen, {again:.1f} % again"


# --- Whether the others hold the same model as this node, as far as their claims and ours can tell.
#
# Snapshots of a round do not appear everywhere at once, and a node that lags behind has older ones. So each
# replica is compared with ours at the newest round of which both have a snapshot.


class Likeness(StrEnum):
    """How another's replica compares with ours at one round."""

    SAME = "same"
    RECORDS = "records"
    """The node has merged other records up to that round: a late record has so far reached only one of us."""

    OTHER = "other"
    """The node claims to have merged the same records, and holds a different model."""


def compare(ours: Iterable[Claim], theirs: Iterable[Claim]) -> tuple[Likeness, int] | tuple[None, None]:
    """How another's replica compares with ours, and at which round: the newest of which both have a
    snapshot."""
    own_at = {claim.round: claim for claim in ours}
    other = max((claim for claim in theirs if claim.round in own_at), default=None)
    if other is None:
        return None, None
    own = own_at[other.round]
    if own.digest != other.digest:
        return Likeness.RECORDS, other.round
    return Likeness.SAME if own.root == other.root else Likeness.OTHER, other.round
