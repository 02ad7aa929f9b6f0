"""Merge: parameter-records a second on one core, by rule and codec, and what judging members adds."""

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import best_of, copy_seconds, delta_like
from gossamer.protocol.conduct import figures
from gossamer.protocol.layout import TensorSpec, plan
from gossamer.protocol.manifest import Outer
from gossamer.protocol.merge import Contribution, RoundMerge, measure, merge_round
from gossamer.protocol.payload import Payload, encode_payload
from gossamer.protocol.rules import RULES

RECORDS = 8


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure merges of 8 records; prints a table and returns its rows."""
    side, repeats = (256, 2) if quick else (2048, 3)
    rows = []
    for rule in RULES:
        fragment = plan([TensorSpec("w", (side, side), rule)], 1).fragments[0]
        copy_s = copy_seconds(delta_like(fragment.numel), repeats)
        for codec in ("int8", "int4", "topk"):
            contributions = []
            for author in range(RECORDS):
                data = encode_payload(codec, fragment, [delta_like(fragment.numel, author)])
                payload = Payload(codec, fragment, data)
                norms, sample = measure(payload)
                contributions.append(
                    Contribution(bytes([author]) * 32, 1000, 10, 0, norms, payload.tensor, sample)
                )
            merge_s = best_of(lambda c=contributions, f=fragment: merge_round(c, f, Outer()), repeats)
            measure_s = best_of(lambda p=payload: measure(p), repeats)
            merge = RoundMerge(contributions, fragment, Outer())
            figures_s = best_of(lambda m=merge: figures(m), repeats)
            rows.append(
                {
                    "rule": rule,
                    "codec": codec,
                    "records": RECORDS,
                    "parameter_records_per_s": RECORDS * fragment.numel / (merge_s + RECORDS * measure_s),
                    "copies_per_record": (merge_s / RECORDS + measure_s) / copy_s,
                    "figures_share": figures_s / (merge_s + RECORDS * measure_s),
                }
            )
    table = Table(title=f"merge of {RECORDS} records, {side}x{side}, one core", title_justify="left")
    for column in ("rule", "codec", "parameter-records", "memory copies a record", "figures"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["rule"],
            row["codec"],
            f"{row['parameter_records_per_s'] / 1e6:,.0f} M/s",
            f"{row['copies_per_record']:.1f}",
            f"{row['figures_share']:.1%}",
        )
    Console().print(table)
    return rows
