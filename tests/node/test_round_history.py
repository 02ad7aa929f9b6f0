"""`gossamer.node.daemon.monitoring.round_history`: what happened, round by round, in memory and on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.node.daemon.monitoring import round_history
from gossamer.node.daemon.monitoring.round_history import (
    CLIPPED,
    LATE,
    OWN,
    VOID,
    Entry,
    Round,
    RoundHistory,
    dump_rounds,
    load_rounds,
    save_rounds,
)
from gossamer.protocol.errors import StorageError
from gossamer.protocol.merge.contributions import Figures, RoundFigures
from gossamer.protocol.records import Delta
from tests.node.daemons import report
from tests.protocol.builders import LAYOUT, manifest
from tests.protocol.builders import unsigned as delta
from tests.protocol.cost import calls

ME = delta(0, 1).author
ONE = manifest(fragments=1)


class Core:
    """What a history reads of a core. All deltas are valid but those of authors that are `void`."""

    def __init__(self) -> None:
        self.identity = SimpleNamespace(node_id=ME)
        self.manifest = ONE
        self.clock = 100
        self.void: set[bytes] = set()
        self.seen: list[Delta] = []
        self.ledger = SimpleNamespace(floor=0, is_void=lambda d: d.author in self.void, valid=self._valid)

    def _valid(self, _: int) -> list[Delta]:
        return [each for each in self.seen if each.author not in self.void]


def made() -> RoundHistory:
    return RoundHistory(Core())  # type: ignore[arg-type]


def core_of(history: RoundHistory) -> Core:
    return history._core  # type: ignore[return-value]


def heard(history: RoundHistory, *deltas: Delta, live: bool = True, clock: int = 100) -> None:
    core_of(history).clock = clock
    core_of(history).seen.extend(deltas)
    for each in deltas:
        history.heard(each, live=live)


def merged(
    history: RoundHistory,
    *deltas: Delta,
    void: Any = (),
    figures: dict[bytes, Figures] | None = None,
    agreement: float | None = None,
) -> None:
    core_of(history).clock = 100
    core_of(history).seen.extend(deltas)
    core_of(history).void = set(void)
    found = None if figures is None else RoundFigures(figures, agreement)
    history.merged(deltas[0].round, deltas, found)


def row(history: RoundHistory, round_: int) -> Round:
    (found,) = history.newest(round_, round_)
    return found


def line(found: Round) -> list[Any]:
    """A round as the page is told it."""
    (told,) = json.loads(dump_rounds([found], None, LAYOUT))["rounds"]
    return list(told)


def rounds_of(history: RoundHistory, first: int = 0) -> list[Round]:
    """What is kept from one on, ascending."""
    return history.newest(first)


def flags(history: RoundHistory, round_: int) -> dict[bytes, int]:
    return {author: entry.flags for author, entry in row(history, round_).entries.items()}


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> RoundHistory:
    monkeypatch.setattr(round_history.time, "time", lambda: 5.0)
    return made()


def test_a_round_is_told_as_it_is_heard_and_merged(history: RoundHistory) -> None:
    mine, other = delta(0, 1, loss=1.0, tokens=100), delta(1, 1, loss=3.0, tokens=300)
    heard(history, mine, other)
    found = row(history, 1)
    assert (found.seen, found.merged_tokens, line(found)[2:4]) == (5.0, None, [2.0, 400])
    assert flags(history, 1) == {mine.author: OWN, other.author: 0}
    merged(history, mine, other, figures={mine.author: Figures(), other.author: Figures()}, agreement=0.5)
    assert (row(history, 1).merged_tokens, row(history, 1).agreement) == (400, 0.5)
    assert row(history, 1).entries == {
        mine.author: Entry(100, 10, 0, 1.0, OWN),
        other.author: Entry(300, 10, 0, 3.0, 0),
    }


def test_a_round_that_is_merged_anew_costs_what_is_new_in_it(history: RoundHistory) -> None:
    """Each delta of a thousand was looked for among all others, at each merge."""
    deltas = [delta(author, 1) for author in range(400)]
    assert calls(lambda: heard(history, *deltas)) < 40 * len(deltas)
    merged(history, *deltas)
    late = delta(400, 1)
    assert calls(lambda: merged(history, *deltas, late)) < 12 * len(deltas)
    assert row(history, 1).entries.keys() == {each.author for each in (*deltas, late)}


def test_late_is_what_came_after_a_later_round_was_merged(history: RoundHistory) -> None:
    first, second, late = delta(1, 1), delta(1, 2), delta(2, 1)
    heard(history, first)
    merged(history, first)
    heard(history, delta(3, 1))
    heard(history, second)
    merged(history, second)
    heard(history, late)
    assert flags(history, 1) == {first.author: 0, delta(3, 1).author: 0, late.author: LATE}
    catching_up = delta(4, 1)
    heard(history, catching_up, live=False)
    assert flags(history, 1)[catching_up.author] == 0, "a node that catches up hears everything late"


def test_a_round_names_as_many_authors_as_a_swarm_has_and_no_more(
    history: RoundHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys cost nothing, and whoever has made thousands could fill the memory of every node."""
    monkeypatch.setattr(round_history, "MEMBERS_MAX", 3)
    heard(history, *(delta(author, 7) for author in range(5)))
    assert flags(history, 7).keys() == {delta(author, 7).author for author in range(3)}


def test_void_and_clipped_deltas_are_marked_and_do_not_count(history: RoundHistory) -> None:
    liar, broken, long, good = (
        delta(1, 1, loss=9.0),
        delta(2, 1),
        delta(3, 1, loss=2.0),
        delta(4, 1, loss=2.0),
    )
    heard(history, liar, broken, long, good)
    figures = {
        broken.author: Figures(void=True),
        long.author: Figures(clipped=4.0, pace=4.0),
        good.author: Figures(clipped=1.6, pace=1.0),
    }
    merged(history, broken, long, good, void=[liar.author], figures=figures, agreement=0.25)
    assert flags(history, 1) == {
        liar.author: VOID,
        broken.author: VOID,
        long.author: CLIPPED,
        good.author: 0,
    }
    assert line(row(history, 1))[2:4] == [2.0, 2000]
    merged(history, long, good)
    assert row(history, 1).agreement == 0.25, (
        "a merge that changed nothing found nothing, and takes nothing back"
    )
    merged(history, long, good, figures={long.author: Figures(), good.author: Figures()}, agreement=0.3)
    assert flags(history, 1)[long.author] == 0, "beside more deltas it is not too long any more"
    heard(history, delta(5, 1))
    core_of(history).void = {delta(5, 1).author}
    heard(history, delta(5, 1))
    assert flags(history, 1)[delta(5, 1).author] == VOID


def test_one_liar_does_not_make_the_loss_of_a_round(history: RoundHistory) -> None:
    honest = [delta(author, 1, loss=2.0 + author / 10, tokens=1000) for author in range(1, 4)]
    liar = delta(9, 1, loss=-1e6, tokens=2**40)
    heard(history, *honest, liar)
    assert line(row(history, 1))[2] == 2.15


def test_old_rounds_make_room_and_a_liar_cannot_clear_them_away(
    history: RoundHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_history, "ENTRIES_MAX", 3)
    heard(history, *(delta(1, round_) for round_ in (1, 2, 3, 4)), clock=4)
    assert [found.number for found in rounds_of(history)] == [2, 3, 4]
    heard(history, delta(2, 4 + round_history.AHEAD_MAX + 1), delta(2, 1), clock=4)
    assert [found.number for found in rounds_of(history)] == [2, 3, 4]
    monkeypatch.setattr(round_history, "ENTRIES_MAX", 4)
    heard(history, delta(2, 4), delta(3, 4), clock=4)
    assert [found.number for found in rounds_of(history)] == [3, 4]
    assert [found.number for found in rounds_of(history, 4)] == [4]


def test_making_room_costs_no_look_at_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner hears of many times as many as are kept, one after another."""

    class Number(int):
        def __lt__(self, other: int) -> bool:
            return int(self) < int(other)

    def cost(rounds: int) -> int:
        monkeypatch.setattr(round_history, "ENTRIES_MAX", rounds)
        history = made()
        heard(history, *(delta(1, Number(n)) for n in range(1, rounds + 1)), clock=rounds)
        work = calls(lambda: heard(history, delta(1, Number(rounds + 1)), clock=rounds))
        assert history.oldest() == 2
        return work

    assert cost(800) - cost(100) < 20


def test_json_names_every_author_once(history: RoundHistory) -> None:
    heard(history, delta(0, 1), delta(1, 1), delta(1, 2))
    merged(history, delta(1, 2, loss=1.23456789), agreement=0.123456, figures={})
    told = json.loads(dump_rounds(rounds_of(history), 1, LAYOUT))
    assert told["oldest"] == 1
    authors = [bytes.fromhex(author) for author in told["authors"]]
    assert sorted(authors) == sorted([ME, delta(1, 1).author])
    first, second = told["rounds"]
    assert first[:6] == [1, 5.0, 2.5, 2000, None, None]
    assert second[:6] == [2, 5.0, 2.5, 1000, 500, 0.1235]
    assert [authors[entry[0]] for entry in first[6]] == sorted(authors)
    assert second[6] == [[authors.index(delta(1, 1).author), 1000, 10, 0, 2.5, 0]]


def test_json_tells_tokens_trained_however_many_fragments_there_are(history: RoundHistory) -> None:
    """And a liar's no more than is usual, whatever it states."""
    liar = delta(9, 11, tokens=2**40)
    heard(history, liar)
    merged(history, delta(1, 11, tokens=400), void=[liar.author])
    assert row(history, 11).merged_tokens == 400
    merged(history, delta(1, 12, tokens=400), delta(2, 12, tokens=400), delta(9, 12, tokens=2**40))
    assert row(history, 12).merged_tokens < 10_000
    for fragments in (1, 2, 4):
        layout = manifest(fragments=fragments).plan()
        (told,) = json.loads(dump_rounds([row(history, 11)], 11, layout))["rounds"]
        assert told[3:5] == [400, 400 // fragments]


# -- on disk


def saved(history: RoundHistory, path: Path, *, anew: bool = False) -> bool:
    return save_rounds(path, history.take_unsaved(everything=anew), anew=anew)


def loaded(path: Path) -> RoundHistory:
    history = made()
    history.restore(load_rounds(path))
    return history


def evaluated(
    history: RoundHistory,
    round_: int,
    loss: float | None,
    version: int | None = None,
    average: float | None = None,
) -> None:
    history.evaluated(
        report(
            val_loss=loss,
            val_loss_average=average,
            evaluated_version=round_ if version is None else version,
            evaluated_round=round_,
        )
    )


def test_it_is_kept_over_restarts(tmp_path: Path, history: RoundHistory) -> None:
    path = tmp_path / "h"
    assert rounds_of(loaded(path)) == []
    heard(history, delta(0, 1), delta(1, 1), delta(1, 2))
    evaluated(history, 1, 3.0)
    assert not saved(history, path, anew=True)
    merged(history, delta(1, 2), figures={}, agreement=0.5)
    evaluated(history, 2, 2.0, average=1.5)
    saved(history, path)
    assert len(path.read_bytes().splitlines()) == 3, "only what has changed is appended"
    again = loaded(path)
    assert rounds_of(again) == rounds_of(history), "what was saved later counts"
    losses = [[1, 3.0, None], [2, 2.0, 1.5]]
    assert again.losses_as_json()["losses"] == losses
    evaluated(again, 2, 2.0, 7, 1.5)  # a trainer that lived on repeats it to the next daemon
    assert again.losses_as_json() == {"version": 7, "losses": losses}
    assert history.take_unsaved(everything=False) == []


def test_what_is_damaged_is_skipped_and_gone_with_the_next_save(
    tmp_path: Path, history: RoundHistory
) -> None:
    path = tmp_path / "h"
    heard(history, delta(0, 1), delta(0, 2))
    saved(history, path, anew=True)
    whole = path.read_bytes()
    odd = b'[]\n["round",1]\n[1]\n{"a":1}\n7\n[1,2,3,4,[["x"]],null]\n' + b"[" * 5000 + b"\n\xff\n"
    for end in range(len(whole) - 1):
        path.write_bytes(odd + whole[:end])
        kept = [found.number for found in rounds_of(loaded(path))]
        assert kept == [1, 2][: len(kept)]
    again = loaded(path)
    heard(again, delta(0, 2), delta(0, 3))
    saved(again, path, anew=True)
    assert len(path.read_bytes().splitlines()) == 3
    path.write_bytes(whole)
    assert [found.number for found in rounds_of(loaded(path))] == [1, 2]


def test_the_file_is_bounded_by_what_it_has_to_hold(
    tmp_path: Path, history: RoundHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_history, "FILE_BYTES_MAX", 5000)
    monkeypatch.setattr(round_history, "ENTRIES_MAX", 20)
    path, anew = tmp_path / "h", True
    for number in range(1, 301):
        heard(history, delta(1, number), clock=number)
        anew = saved(history, path, anew=anew)
    assert path.stat().st_size < 5000 + 1000
    assert [found.number for found in rounds_of(loaded(path))][-20:] == list(range(281, 301))


def test_a_folder_that_is_gone_is_said(tmp_path: Path, history: RoundHistory) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        saved(history, tmp_path / "missing" / "h", anew=True)


def test_held_out_losses_are_those_of_their_rounds(history: RoundHistory) -> None:
    history.evaluated(None)
    for round_, loss, version in ((0, 5.0, 0), (0, 5.0, 0), (5, 4.0, 7), (6, float("nan"), 8), (7, None, 9)):
        evaluated(history, round_, loss, version)
    assert history.losses_as_json() == {"version": 8, "losses": [[0, 5.0, None], [5, 4.0, None]]}
    assert json.loads(dump_rounds(rounds_of(history), None, LAYOUT))["rounds"] == []
    assert history.oldest() is None, "nobody has trained yet"
