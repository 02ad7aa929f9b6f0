"""A manifest as people read and edit it: TOML, with the meaning of values beside them."""

import re

from gossamer.models.registry import OptionValue
from gossamer.protocol.manifest import Manifest


def to_toml(manifest: Manifest) -> str:
    """The file's text; read back, it gives the same manifest."""
    outer, pace = manifest.outer, manifest.pace
    option_lines = "\n".join(f"{_key(key)} = {_value(value)}" for key, value in manifest.task.options.items())
    tensor_lines = "\n".join(
        f"    [{_value(spec.name)}, {list(spec.shape)}, {_value(spec.averaging)}],"
        for spec in manifest.layout.tensors
    )
    # Only custom tasks have a source.
    source_line = (
        f"source = {_value(manifest.task.source)}  # digest of its file\n" if manifest.task.source else ""
    )
    owners = ", ".join(_value(owner) for owner in manifest.admission.owners)
    return f"""\
# A Gossamer swarm. All its nodes agree on everything here: change any value, and it is another swarm.

[swarm]
name = {_value(manifest.swarm.name)}
created = {manifest.swarm.created}  # Unix seconds

[task]
name = {_value(manifest.task.name)}
seed = {manifest.task.seed}
{source_line}
[task.options]
{option_lines}

[outer]
codec = {_value(outer.codec)}  # exact, int8, int4, int2 or topk
learning_rate = {outer.learning_rate}
momentum = {outer.momentum}
ef_decay = {outer.ef_decay}  # how much of what a codec left out is carried into the next delta
clip = {outer.clip}  # times the median norm per square root of steps; 0 for none
weight_cap = {outer.weight_cap}  # times the median weight; 0 for none
staleness_max = {outer.staleness_max}

[pace]
every_steps = {pace.every_steps}  # inner steps between two deltas of a fragment, or 0 ...
every_seconds = {pace.every_seconds}  # ... and seconds instead
min_round_seconds = {pace.min_round_seconds}

[history]  # all in rounds
seal_after = {manifest.history.seal_after}
snapshot_every = {manifest.history.snapshot_every}
retain = {manifest.history.retain}  # how long a partition may last and still heal exactly; 0 keeps all

[admission]
mode = {_value(manifest.admission.mode)}  # open, or invited: only nodes that an owner invites
owners = [{owners}]  # public keys that can invite and revoke

[genesis]
digest = {_value(manifest.genesis.digest)}

[layout]
fragments = {manifest.layout.fragments}
tensors = [  # name, shape, averaging rule
{tensor_lines}
]
"""


def _value(value: OptionValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


def _key(name: str) -> str:
    """A TOML key, bare if TOML allows that."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)
