"""Merge: parameter-records a second on one core, by rule and codec, and what judging members adds."""

from typing import Any

from benchmarks.goals import Goal
from benchmarks.measure import best_of, copy_seconds, delta_like
from benchmarks.tables import Table
from gossamer.protocol.conduct import figures
from gossamer.protocol.layout import TensorSpec, plan
from gossamer.protocol.manifest import Outer
from gossamer.protocol.merge import Contribution, RoundMerge, measure, merge_round
from gossamer.protocol.payload import Payload, encode_payload
from gossamer.protocol.rules import RULES

RECORDS = 8


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure merges of 8 records, norms included, by rule and codec: one row each."""
    side, repeats = (256, 2) if quick else (2048, 5)
    return [_row(rule, codec, side, repeats) for rule in RULES for codec in ("int8", "int4", "topk")]


def _row(rule: str, codec: str, side: int, repeats: int) -> dict[str, Any]:
    fragment = plan([TensorSpec("w", (side, side), rule)], 1).fragments[0]
    copy_s = copy_seconds(delta_like(fragment.numel), repeats)
    contributions = []
    for author in range(RECORDS):
        data = encode_payload(codec, fragment, [delta_like(fragment.numel, author)])
        payload = Payload(codec, fragment, data)
        norms, sample = measure(payload)
        contributions.append(Contribution(bytes([author]) * 32, 1000, 10, 0, norms, payload.tensor, sample))
    merge = RoundMerge(contributions, fragment, Outer())
    merge_s = best_of(lambda: merge_round(contributions, fragment, Outer()), repeats)
    measure_s = best_of(lambda: measure(payload), repeats)
    total_s = merge_s + RECORDS * measure_s
    return {
        "rule": rule,
        "codec": codec,
        "records": RECORDS,
        "parameters": fragment.numel,
        "parameter_records_per_s": RECORDS * fragment.numel / total_s,
        "copies_per_record": total_s / RECORDS / copy_s,
        "figures_share": best_of(lambda: figures(merge), repeats) / total_s,
    }


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Speed, by rule and codec."""
    lines = [
        (
            row["rule"],
            row["codec"],
            f"{row['parameter_records_per_s'] / 1e6:,.0f} M/s",
            f"{row['copies_per_record']:.1f}",
            f"{row['figures_share']:.1%}",
        )
        for row in rows
    ]
    columns = ("rule", "codec", "parameter-records", "memory copies a record", "judging members adds")
    title = f"merge of {RECORDS} records of {rows[0]['parameters'] / 1e6:.1f} M parameters, one core"
    return [Table(title, columns, lines, words=2)]


def _speed(rule: str, codec: str, rows: list[dict[str, Any]]) -> float:
    found: float = next(
        row["parameter_records_per_s"] for row in rows if (row["rule"], row["codec"]) == (rule, codec)
    )
    return found / 1e6


GOALS = (
    Goal(
        what="merge 8 records of int4 (rda) on one core",
        at_least=250,
        unit="M parameter-records/s",
        measured=lambda rows: _speed("rda", "int4", rows),
    ),
    Goal(
        what="merge 8 records of topk (rda) on one core",
        at_least=1000,
        unit="M parameter-records/s",
        measured=lambda rows: _speed("rda", "topk", rows),
    ),
)
