"""The manifest: a swarm's immutable genesis. Its SHA-256 is the swarm id.

People read and edit it as TOML before the swarm exists. Nodes exchange and hash its canonical bytes, msgpack
maps with sorted keys. So comments and layout of the TOML do not matter, and every value does.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import msgpack
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from gossamer.protocol import limits
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError, MalformedError
from gossamer.protocol.identity import has_small_order
from gossamer.protocol.payloads import STRIP, Layout, TensorSpec, length_in, plan
from gossamer.protocol.rules import RULES
from gossamer.protocol.wire import at_most, is_printable

_ARRAYS_MAX = 3 + 2 * limits.TENSORS_MAX
"""The lists of codecs, of owners and of tensors, and for each tensor its entry and its shape."""

_MAPS_MAX = 64
"""A manifest is a map of sections, which hold a map of options, and one of each codec."""

OUTER_OPTIMIZERS = {"nesterov"}
"""The outer optimizers that a manifest may name. What they do is in `gossamer.node.trainer.outer_optimizers`:
each trainer runs its own, and nothing else of a node depends on it."""

BOUND_MIN = 0.001
"""A bound is a multiple of a median. A multiple smaller than this leaves nothing to merge, and a much smaller
one comes out as 0."""


def _that(holds: Callable[[Any], bool], problem: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _option(value: Any) -> Any:
    """Accept what TOML and msgpack can both hold. The error is one line; a union would give one per type."""
    fits = isinstance(value, str | bool) or (isinstance(value, int) and -(2**63) <= value < 2**63)
    if not fits and not (isinstance(value, float) and math.isfinite(value)):
        raise ValueError("an option is a string, a boolean, a finite number or an integer of 64 bits")
    return value


def _known(name: str, names: Collection[str], where: str = "") -> str:
    if name not in names:
        raise ValueError(f"{where}{name!r} is unknown; choose one of {', '.join(sorted(names))}")
    return name


Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PublicKey = Annotated[
    Hex, _that(lambda key: not has_small_order(bytes.fromhex(key)), "is not a usable public key")
]
Text = Annotated[
    str,
    Field(min_length=1, max_length=200),
    _that(is_printable, "must be printable, since it is shown on terminals"),
]
Option = Annotated[str | int | float | bool, BeforeValidator(_option)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bound = Annotated[
    NonNegative,
    _that(lambda n: n == 0.0 or n >= BOUND_MIN, f"must be 0, for no bound, or at least {BOUND_MIN}"),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Swarm(_Section):
    """What this swarm is called and when it began."""

    name: Text
    created: Annotated[int, Field(ge=0, le=limits.UNIX_S_MAX)]
    """Unix seconds; with `pace.min_round_seconds` it bounds which rounds are plausible."""


class TaskSection(_Section):
    """What is trained: a task's name and its options, as `gossamer.models` understands them."""

    name: Text
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds the first parameters, and the order in which each node takes its data."""
    source: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the file that holds a task of the user's own: nodes with another file are told. Empty for
    other tasks; then the canonical form leaves it out."""
    options: dict[str, Option] = {}

    @model_serializer(mode="wrap")
    def _without_empty_source(self, serialised: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialised(self)
        if not self.source:
            del values["source"]
        return values


class Rung(_Section):
    """A codec that deltas may be compressed with, and the outer settings that suit it."""

    name: Annotated[str, AfterValidator(lambda name: _known(name, CODECS))] = "int4"
    """A name in `CODECS`."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.5
    """The outer learning rate: the part of a window's progress that becomes a delta."""
    ef_decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    """What part of the error-feedback residual is carried into the next delta."""


class Outer(_Section):
    """How windows become deltas, and deltas become Phi."""

    codecs: Annotated[tuple[Rung, ...], Field(min_length=1, strict=False)] = (Rung(),)
    """The ladder: each node takes the finest that its uplink carries, and a round may mix them."""
    optimizer: Annotated[str, AfterValidator(lambda name: _known(name, OUTER_OPTIMIZERS))] = "nesterov"
    """What each node makes of a window's progress before it compresses it: a name in `OUTER_OPTIMIZERS`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.7
    """The outer optimizer's momentum; each node keeps its own, whichever codec it uses."""
    clip: Bound = 3.0
    """A multiple of the round's median of norm / sqrt(steps), per tensor; 0 switches clipping off."""
    weight_cap: Bound = 4.0
    """A multiple of the round's median weight; 0 means no cap, for machines that differ a thousandfold."""
    staleness_max: Annotated[int, Field(ge=0, le=limits.STALENESS_MAX)] = 16
    """A delta has no weight if its fragment was merged more often than this during its window."""

    @property
    def rungs(self) -> dict[str, Rung]:
        """The ladder by the codecs' names, finest first."""
        return {rung.name: rung for rung in self.codecs}

    @model_validator(mode="after")
    def _finest_first(self) -> Self:
        sizes = [CODECS[rung.name].section_bytes(STRIP) for rung in self.codecs]
        if any(coarser >= finer for finer, coarser in pairwise(sizes)):
            raise ValueError("codecs: list each once, those that write more bytes first")
        return self


class PaceSection(_Section):
    """When a node publishes. If both lengths are 0, the swarm sets its own pace (see `pace`)."""

    every_steps: Annotated[int, Field(ge=0, le=limits.STEPS_MAX)] = 0
    """Inner steps in one window, that is, between two deltas of the same fragment."""
    every_seconds: NonNegative = 0.0
    """The length of one window, in seconds."""
    max_mbit: NonNegative = 0.0
    """Payloads that a member may receive, Mbit/s, where the swarm sets its pace; 0 for what lines carry."""
    contributors: Annotated[int, Field(ge=0, le=limits.MEMBERS_MAX)] = 64
    """In a larger swarm about so many nodes contribute to a round, in windows that are longer in proportion;
    0 for no bound."""
    min_round_seconds: Positive = 0.05
    """No round follows the one before it sooner than this; rounds beyond that are refused as implausible."""

    @property
    def is_set_by_swarm(self) -> bool:
        """Whether no length is fixed."""
        return not (self.every_steps or self.every_seconds)

    @property
    def is_fold(self) -> bool:
        """Whether any of it follows from the records merged."""
        return self.is_set_by_swarm or self.contributors > 0

    @model_validator(mode="after")
    def _one_at_most(self) -> Self:
        if self.every_steps and self.every_seconds:
            raise ValueError("set one of every_steps and every_seconds, or none, and the other to 0")
        if self.max_mbit and not self.is_set_by_swarm:
            raise ValueError(
                "max_mbit bounds a pace that the swarm sets: set every_steps and every_seconds to 0"
            )
        return self


class HistorySection(_Section):
    """When rounds are sealed, snapshotted and forgotten. All values count rounds."""

    seal_after: Annotated[int, Field(ge=1, le=10_000)] = 8
    """A round this far behind the clock is part of the next snapshot."""
    snapshot_every: Annotated[int, Field(ge=1, le=100_000)] = 16
    """Rounds from one snapshot to the next."""
    retain: Annotated[int, Field(ge=0, le=limits.ROUND_MAX)] = 256
    """Rounds whose records and payloads are kept, so that a partition this long heals exactly; 0 for all."""

    def stretched(self, factor: int) -> "HistorySection":
        """The same spans of time where rounds are so much shorter."""
        spans = {name: factor * rounds for name, rounds in self}
        return self.model_copy(update=spans)

    @model_validator(mode="after")
    def _retains_enough(self) -> Self:
        if self.retain and self.retain < self.seal_after + self.snapshot_every:
            raise ValueError("retain must be 0, or at least seal_after + snapshot_every")
        return self


class DataSection(_Section):
    """The data, if all nodes train on the same: then the swarm goes through it together."""

    samples: Annotated[int, Field(ge=0, le=limits.SAMPLES_MAX)] = 0
    """Its size; 0 if each node has data of its own."""
    blocks: Annotated[int, Field(ge=0, le=limits.BLOCKS_MAX)] = 0
    """Into how many blocks it is cut, the unit in which nodes claim what they have trained on."""
    digest: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the data, where the task computes one; or empty."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.blocks > self.samples or (self.blocks == 0) != (self.samples == 0):
            raise ValueError("give samples, and 1 to as many blocks; or neither")
        return self


class LayoutSection(_Section):
    """The named tensors, in order, and the number of fragments that they are split into."""

    fragments: Annotated[int, Field(ge=1, le=limits.FRAGMENTS_MAX)] = 1
    """Parts of the model that take turns: round `r` concerns fragment ``r % fragments``."""
    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=limits.TENSORS_MAX)]

    @cached_property
    def planned(self) -> Layout:
        """See `Manifest.plan`. Made once: for 20,000 tensors that takes 40 ms."""
        return plan(self.tensors, self.fragments)

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        """TOML and msgpack have arrays only; strict validation wants the tuples that we keep."""
        if isinstance(data, dict) and isinstance(data.get("tensors"), list):
            return {**data, "tensors": tuple(map(_tensor, data["tensors"]))}
        return data

    @model_validator(mode="after")
    def _usable(self) -> Self:
        [(name, count)] = Counter(spec.name for spec in self.tensors).most_common(1)
        if count > 1:
            raise ValueError(f"tensor {name!r} is listed twice")
        for spec in self.tensors:
            if spec.name == "__metadata__":  # an export could not hold it
                raise ValueError(f"tensor {spec.name!r} is what safetensors calls its metadata: rename it")
            _known(spec.averaging, RULES, f"tensor {spec.name!r}: averaging ")
            if len(spec.shape) > limits.TENSOR_DIMS_MAX or any(size < 1 for size in spec.shape):
                raise ValueError(
                    f"tensor {spec.name!r}: shape {list(spec.shape)} is impossible: at most"
                    f" {limits.TENSOR_DIMS_MAX} dimensions, each of 1 or more"
                )
        if sum(spec.numel for spec in self.tensors) > limits.PARAMETERS_MAX:
            raise ValueError(f"more than {limits.PARAMETERS_MAX} parameters")
        if not all(fragment.slots for fragment in self.planned.fragments):
            raise ValueError(
                f"{self.fragments} fragments of {len(self.tensors)} tensors: use fewer fragments"
            )
        return self


def _tensor(entry: Any) -> Any:
    if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[1], list):
        return TensorSpec(entry[0], tuple(entry[1]), entry[2])
    return entry


class Genesis(_Section):
    """Phi_0: the root (see `payloads`) of the first parameters' int32 bytes."""

    digest: Hex

    @property
    def root(self) -> bytes:
        return bytes.fromhex(self.digest)


class AdmissionSection(_Section):
    """Who may take part: everybody, or only those whom an owner has invited (see `acl`)."""

    mode: Literal["open", "invited"] = "open"
    owners: Annotated[tuple[PublicKey, ...], Field(max_length=limits.OWNERS_MAX, strict=False)] = ()
    """Ed25519 public keys, in hex, that may invite and revoke; a running node needs none of the secrets."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.mode == "invited" and not self.owners:
            raise ValueError("an invited swarm needs at least one owner, who can invite")
        if len(set(self.owners)) < len(self.owners):
            raise ValueError("an owner is listed twice")
        return self


class Manifest(_Section):
    """Everything that all nodes must agree on before the first step. Immutable, and checked when made.

    Read one with `from_toml` or `from_canonical`; `docs/protocol.md` explains every value.
    """

    version: Literal[1] = 1
    swarm: Swarm
    task: TaskSection
    outer: Outer = Outer()
    pace: PaceSection = PaceSection()
    history: HistorySection = HistorySection()
    data: DataSection = DataSection()
    admission: AdmissionSection = AdmissionSection()
    layout: LayoutSection
    genesis: Genesis

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (length := self.payload_max) > limits.PAYLOAD_CHUNKS_MAX * limits.CHUNK_BYTES_MAX:
            raise ValueError(
                f"layout.fragments: a delta has {length} bytes, over the limit of 1 GiB: use more fragments"
            )
        if len(self.canonical()) > limits.MANIFEST_BYTES_MAX:
            raise ValueError(
                f"layout: a manifest of over {limits.MANIFEST_BYTES_MAX} bytes: shorten the names"
            )
        return self

    def plan(self) -> Layout:
        """The layout of Phi: which fragment each tensor belongs to, and where it starts."""
        return self.layout.planned

    @property
    def payload_max(self) -> int:
        """The length in bytes of the longest payload that a delta may have."""
        layout, rounds = self.plan(), range(self.layout.fragments)
        return max(length_in(round_, codec, layout) for codec in self.outer.rungs for round_ in rounds)

    def canonical(self) -> bytes:
        """The bytes that nodes exchange, and whose SHA-256 is the swarm id."""
        packed: bytes = msgpack.packb(_sorted(self.model_dump(mode="python")), use_bin_type=True)
        return packed

    @property
    def swarm_id(self) -> bytes:
        """32 bytes: the SHA-256 of `canonical`."""
        return sha256(self.canonical()).digest()


def _sorted(value: Any) -> Any:
    """Maps with their keys in order."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    is_of_maps = isinstance(value, tuple) and value and isinstance(value[0], dict)
    return list(map(_sorted, value)) if is_of_maps else value


def _first_problem(error: ValidationError) -> str:
    """The first problem, as one line that names the field."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if not where.isprintable():  # an unknown key from a peer may hold anything
        where = ascii(where)
    ours = {"missing": "missing; is the file complete?", "extra_forbidden": "unknown key"}
    what = ours.get(first["type"], first["msg"].removeprefix("Value error, "))
    return f"{where}: {what}" if where else what


def from_values(values: Mapping[str, Any], source: str) -> Manifest:
    """Check a manifest given as nested dicts. Raises ConfigError naming `source` and the first problem."""
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_problem(error)}") from None


def from_toml(text: str, source: str) -> Manifest:
    """Parse a manifest as people write it. Raises ConfigError naming `source` and the first problem."""
    try:
        return from_values(tomllib.loads(text), source)
    except (ValueError, RecursionError) as error:  # tomllib passes on those of int() and of deep nesting
        raise ConfigError(f"{source} is not valid TOML: {error}") from None


def is_canonical(data: bytes) -> bool:
    """Whether a file holds a manifest's canonical bytes, perhaps damaged, and not its TOML: a small map
    begins with a byte that cannot begin UTF-8."""
    return bool(data) and data[0] & 0xF0 == 0x80


def from_canonical(data: bytes) -> Manifest:
    """Parse a manifest from a peer or a node's folder.

    Raises MalformedError, also for another encoding of the same values.
    """
    if len(data) > limits.MANIFEST_BYTES_MAX:
        raise MalformedError(f"a manifest of {len(data)} bytes")
    try:
        values = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            list_hook=at_most(_ARRAYS_MAX),
            object_hook=at_most(_MAPS_MAX),
            ext_hook=at_most(0),
        )
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        raise MalformedError(f"manifest: {_first_problem(error)}") from None
    except Exception as error:  # msgpack raises ValueError, its own classes and UnicodeError
        raise MalformedError(f"manifest is not msgpack: {type(error).__name__}") from None
    if manifest.canonical() != data:
        raise MalformedError("manifest is not in canonical form")
    return manifest
