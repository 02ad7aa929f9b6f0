"""The manifest: one meaning, one sequence of bytes; and a clear line for everything that is wrong."""

from __future__ import annotations

import copy
from datetime import date

import msgpack
import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import ConfigError, MalformedError
from gossamer.protocol.manifest import from_canonical, from_toml, from_values
from gossamer.protocol.payloads import TensorSpec
from tests.protocol import builders

TOML = """
# a comment
version = 1

[swarm]
name = "shakespeare"
created = 1700000000

[task]
name = "gpt"
seed = 7
options = { width = 64, dropout = 0.5, tie = true, corpus = "a.txt" }

[outer]
clip = 3

[[outer.codecs]]
name = "int4"
learning_rate = 0.5

[[outer.codecs]]
name = "topk"

[pace]
every_steps = 30

[layout]
fragments = 2
tensors = [["wte", [256, 64], "mean"], ["w", [64, 64], "rda"], ["scale", [], "mean"]]

[genesis]
digest = "1111111111111111111111111111111111111111111111111111111111111111"
"""

SAME_BUT_SHUFFLED = """
genesis.digest = '1111111111111111111111111111111111111111111111111111111111111111'
pace = { every_steps = 3_0 }
layout.tensors = [
    ["wte", [0x100, 64], "mean"], # the embedding
    ["w", [64, 64], "rda"],
    ["scale", [], "mean"],
]
layout.fragments = 2
outer = { clip = 3.0, codecs = [{ name = "int4" }, { learning_rate = 5e-1, name = "topk" }] }
task.options.tie = true
task.options.corpus = "a.txt"
task.options.dropout = 0.5
task.options.width = 64
task.seed = 7
task.name = "gpt"
swarm = { created = 1_700_000_000, name = "shakes\\u0070eare" }
"""


def test_swarm_id_depends_on_values_only():
    one, other = from_toml(TOML, "a"), from_toml(SAME_BUT_SHUFFLED, "b")
    assert one == other
    assert one.canonical() == other.canonical()
    assert one.swarm_id == other.swarm_id


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed = 7", "seed = 8"),
        ('"shakespeare"', '"Shakespeare"'),
        ("created = 1700000000", "created = 1700000001"),
        ("width = 64", "width = 64.0"),
        ("tie = true", "tie = false"),
        ("tie = true", "tie = 1"),
        ("clip = 3", "clip = 3.0000001"),
        ("every_steps = 30", "every_steps = 31"),
        ("fragments = 2", "fragments = 3"),
        ("[64, 64]", "[64, 32]"),
        ("[64, 64]", "[4096]"),
        ('"rda"', '"mean"'),
        ('["w", [64, 64], "rda"], ["scale", [], "mean"]', '["scale", [], "mean"], ["w", [64, 64], "rda"]'),
        ('digest = "1', 'digest = "2'),
    ],
)
def test_every_value_matters(old, new):
    assert TOML.count(old) == 1
    assert from_toml(TOML, "a").swarm_id != from_toml(TOML.replace(old, new), "a").swarm_id


def test_canonical_bytes_come_back():
    for manifest in (from_toml(TOML, "a"), builders.SMALL):
        again = from_canonical(manifest.canonical())
        assert again == manifest
        assert again.swarm_id == manifest.swarm_id
        assert again.plan() == manifest.plan()
        assert again.plan() is again.plan(), "planned once: with many tensors that takes a while"


def test_one_large_tensor_may_be_in_several_fragments():
    several = builders.manifest((TensorSpec("w", (300, 500), "mean"),), fragments=2)
    assert [fragment.numel for fragment in several.plan().fragments] == [131_072, 18_928]


def _unpacked() -> dict:
    return msgpack.unpackb(from_toml(TOML, "a").canonical())


def test_a_second_encoding_of_the_same_values_is_refused():
    values = _unpacked()
    backwards = {key: values[key] for key in sorted(values, reverse=True)}
    as_integer = copy.deepcopy(values)
    as_integer["outer"]["clip"] = 3
    for other in (backwards, as_integer):
        with pytest.raises(MalformedError, match="canonical"):
            from_canonical(msgpack.packb(other))
    with pytest.raises(MalformedError):
        from_canonical(msgpack.packb(values, use_single_float=True))
    with pytest.raises(MalformedError):
        from_canonical(from_toml(TOML, "a").canonical() + b"\xc0")


@pytest.mark.parametrize("wrong", [date(2026, 1, 1), b"x", [b"x"], {"x": b"x"}], ids=str)
def test_what_is_of_another_kind_is_refused_wherever_it_stands(wrong):
    """And the message says where."""
    for section, keys in _unpacked().items():
        for key in (None, *(keys if isinstance(keys, dict) else ())):
            values = _unpacked()
            if key is None:
                values[section] = wrong
            else:
                values[section][key] = wrong
            with pytest.raises(ConfigError, match=f"^here: {section}"):
                from_values(values, "here")


def test_bombs_and_giants_from_a_peer_are_malformed():
    for data in (b"\x81\xa1a" * 5000, b"\xdd\x00\x10\x00\x00" * 2000, bytes(limits.MANIFEST_BYTES_MAX + 1)):
        with pytest.raises(MalformedError):
            from_canonical(data)


BIG = "1" + 400 * "0"
KEY = builders.identity(1).public_key.hex()

WRONG = [
    # old, new, what the message must name
    ("seed = 7", "sed = 7", "task.sed: unknown key"),
    ("version = 1", "swarmm = 1", "swarmm: unknown key"),
    ("[genesis]", "[genesi]", "genesis"),
    ("created = 1700000000", "", "swarm.created"),
    ("created = 1700000000", "created = '1700000000'", "swarm.created"),
    ("created = 1700000000", "created = true", "swarm.created"),
    ("created = 1700000000", "created = 1.5", "swarm.created"),
    ("created = 1700000000", "created = 2020-01-01", "swarm.created"),
    ("created = 1700000000", "created = -1", "swarm.created"),
    ("version = 1", "version = 2", "version"),
    ('name = "shakespeare"', 'name = ""', "swarm.name"),
    ('name = "shakespeare"', 'name = "a\\u001b[2J"', "swarm.name"),
    ('name = "shakespeare"', 'name = "%s"' % ("x" * 201), "swarm.name"),
    ("seed = 7", "seed = -1", "task.seed"),
    ("seed = 7", f"seed = {2**63}", "task.seed"),
    ("width = 64", f"width = {2**63}", "task.options.width"),
    ("width = 64", f"width = -{2**70}", "task.options.width"),
    ("width = 64", "width = [64]", "task.options.width"),
    ("width = 64", "width = nan", "task.options.width"),
    (
        'name = "int4"',
        'name = "zip"',
        "outer.codecs.0.name: 'zip' is unknown; choose one of exact, int2, int4, int8, topk, topk16, topk8",
    ),
    ('name = "int4"', "name = 4", "outer.codecs.0.name"),
    ('name = "topk"', 'name = "int4"', "codecs: list each once, those that write more bytes first"),
    ('name = "topk"', 'name = "int8"', "codecs: list each once, those that write more bytes first"),
    ("clip = 3", "clip = -1", "outer.clip"),
    ("clip = 3", "clip = nan", "outer.clip"),
    ("clip = 3", "clip = inf", "outer.clip"),
    ("clip = 3", "clip = true", "outer.clip"),
    ("clip = 3", f"clip = {BIG}", "outer.clip"),
    ("clip = 3", "clip = 0.0009", "must be 0, for no bound, or at least 0.001"),
    ("clip = 3", "weight_cap = 1e-320", "outer.weight_cap"),
    ("clip = 3", "momentum = 1.0", "outer.momentum"),
    ("learning_rate = 0.5", "learning_rate = 0", "outer.codecs.0.learning_rate"),
    ("clip = 3", "staleness_max = 2000000", "outer.staleness_max"),
    ("every_steps = 30", "every_steps = 30\nevery_seconds = 3.0", "every_seconds"),
    ("every_steps = 30", "every_steps = 30\nmax_mbit = 3.0", "max_mbit"),
    ("every_steps = 30", "min_round_seconds = 0.0", "pace.min_round_seconds"),
    ("fragments = 2", "fragments = 0", "layout.fragments"),
    ("fragments = 2", "fragments = 4", "4 fragments of 3 tensors"),
    ('["w", [64, 64], "rda"]', '["wte", [64, 64], "rda"]', "tensor 'wte' is listed twice"),
    ('"w",', '"__metadata__",', "tensor '__metadata__' is what safetensors calls"),
    ('"rda"', '"median"', "tensor 'w': averaging 'median' is unknown; choose one of"),
    ("[64, 64]", "[64, 0]", "tensor 'w': shape [64, 0]"),
    ("[64, 64]", "[64, -64]", "tensor 'w': shape"),
    ("[64, 64]", "[1,1,1,1,1,1,1,1,1]", "tensor 'w': shape"),
    ("[64, 64]", "[64.0]", "layout.tensors.1"),
    ("[64, 64]", '"64"', "layout.tensors.1"),
    ("[64, 64]", f"[{2**40}]", "parameters"),
    ("[64, 64]", f"[{2**32}]", "layout.fragments: a delta has"),
    ('["scale", [], "mean"]', '["scale", []]', "layout.tensors.2"),
    ('["scale", [], "mean"]', "3", "layout.tensors.2"),
    ('digest = "1', 'digest = "', "genesis.digest"),
    ('digest = "1', 'digest = "A', "genesis.digest"),
    ("fragments = 2", "fragments = = 2", "not valid TOML"),
    ("seed = 7", "seed = " + "1" * 5000, "not valid TOML"),
    ("seed = 7", "seed = " + "[" * 5000, "not valid TOML"),
    ("[pace]", '[admission]\nmode = "secret"\n[pace]', "admission.mode"),
    (
        "[pace]",
        f"[admission]\nowners = ['{64 * '0'}']\n[pace]",
        "admission.owners.0: is not a usable public key",
    ),
    ("[pace]", f"[admission]\nowners = ['{KEY}', '{KEY}']\n[pace]", "an owner is listed twice"),
    ("[pace]", "[admission]\nmode = 'invited'\n[pace]", "an invited swarm needs at least one owner"),
    ("[pace]", "[history]\nretain = 23\n[pace]", "history: retain must be 0, or at least seal_after + snap"),
]


@pytest.mark.parametrize(
    ("old", "new", "named"), WRONG, ids=[f"{i}-{w[2][:20]}" for i, w in enumerate(WRONG)]
)
def test_what_is_wrong_is_said_in_one_line_that_names_it(old, new, named):
    assert TOML.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        from_toml(TOML.replace(old, new), "my.toml")
    text = str(caught.value)
    assert text.startswith("my.toml")
    assert named in text
    assert text.isprintable(), "one line, and nothing that a terminal would act on"


def test_a_manifest_too_large_to_be_sent_is_refused_at_once():
    tensors = tuple(TensorSpec(f"{i:0300}", (1,), "mean") for i in range(limits.TENSORS_MAX))
    with pytest.raises(ValueError, match="shorten the names"):
        builders.manifest(tensors, 1)


def test_swarm_id_is_that_of_version_1():
    """A change here splits every swarm: it needs a new version."""
    assert (
        from_toml(TOML, "a").swarm_id.hex()
        == "05842b2e9880cf021ee93f3acca23557a3183ef4684071c5419b96bdb89a0c45"
    )


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xc7\x00\x05"])
def test_a_flood_of_empty_items_is_cut_short(item):
    """Each is a byte or three on the wire and 64 in memory: 4 MiB of them would take 260 MiB and seconds."""
    count = 100_000
    with pytest.raises(MalformedError, match="not msgpack"):
        from_canonical(b"\xdd" + count.to_bytes(4, "big") + item * count)


def test_the_source_of_a_task_counts_and_none_leaves_the_id_as_it_was():
    values = builders.SMALL.model_dump()
    assert "source" not in values["task"]
    task = {**values["task"], "source": "ab" * 32}
    own = from_values({**values, "task": task}, "test")
    assert own.swarm_id != builders.SMALL.swarm_id
    assert from_canonical(own.canonical()) == own
    empty = from_values({**values, "task": {**task, "source": ""}}, "test")
    assert empty.swarm_id == builders.SMALL.swarm_id
    written_out = own.canonical().replace(b"\xa6source\xd9\x40" + b"ab" * 32, b"\xa6source\xa0")
    assert len(written_out) == len(own.canonical()) - 65
    with pytest.raises(MalformedError, match="canonical"):
        from_canonical(written_out)
    with pytest.raises(ConfigError, match=r"task\.source"):
        from_values({**values, "task": {**task, "source": "../x.py"}}, "test")
