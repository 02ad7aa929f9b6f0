"""`chronicle` and `chroniclestore`: what happened, round by round."""

from __future__ import annotations

import logging
import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gossamer.node.daemon.monitoring import round_history as chronicles
from gossamer.node.daemon.monitoring import round_history as stores
from gossamer.node.daemon.monitoring.round_history import (
    CLIPPED,
    LATE,
    OWN,
    VOID,
    Chronicle,
    ChronicleStore,
    Entry,
    Evaluations,
    Round,
    as_json,
)
from gossamer.node.ipc.messages import Report
from gossamer.protocol.errors import StorageError
from gossamer.protocol.limits import ROUND_MAX
from gossamer.protocol.merge.contributions import Figures
from gossamer.protocol.merge.tokens import TokenCount
from gossamer.protocol.records import Delta
from tests.node.daemons import report
from tests.protocol.builders import LAYOUT, manifest
from tests.protocol.builders import unsigned as delta
from tests.protocol.cost import calls

ME = delta(0, 1).author
ONE = manifest(fragments=1)


def heard(chronicle: Chronicle, *deltas: Delta, unix_s: float = 5.0, clock: int = 100) -> None:
    for each in deltas:
        chronicle.heard(each, unix_s=unix_s, clock=clock, live=True)


def merged(chronicle: Chronicle, *deltas: Delta, **found: object) -> None:
    chronicle.merged(deltas[0].round, deltas, unix_s=9.0, clock=100, **found)  # type: ignore[arg-type]


def row(chronicle: Chronicle, round_: int) -> Round:
    found = chronicle.at(round_)
    assert found is not None
    return found


def rounds_of(chronicle: Chronicle, first: int = 0) -> list[Round]:
    """What is kept from one on, ascending."""
    return [*chronicle.newest_first(first, ROUND_MAX)][::-1]


def kept_in(store: ChronicleStore, first: int, last: int) -> list[Round]:
    """Ascending, however many."""
    return store.between(first, last, 10**6, 10**6)[::-1]


def flags(chronicle: Chronicle, round_: int) -> dict[bytes, int]:
    return {entry.author: entry.flags for entry in row(chronicle, round_).entries}


@pytest.fixture
def chronicle() -> Chronicle:
    return Chronicle(ME, ONE)


def test_a_round_is_told_as_it_is_heard_and_merged(chronicle: Chronicle) -> None:
    mine, other = delta(0, 1, loss=1.0, tokens=100), delta(1, 1, loss=3.0, tokens=300)
    heard(chronicle, mine, unix_s=5.0)
    heard(chronicle, other, unix_s=6.0)
    found = row(chronicle, 1)
    assert (found.seen, found.tokens, found.loss, found.merged_tokens) == (5.0, 400, 2.0, None)
    assert flags(chronicle, 1) == {mine.author: OWN, other.author: 0}
    merged(chronicle, mine, other, figures={mine.author: Figures(), other.author: Figures()}, agreement=0.5)
    chronicle.settle(0, 0)
    assert (row(chronicle, 1).merged_tokens, row(chronicle, 1).agreement) == (400, 0.5)
    assert set(row(chronicle, 1).entries) == {
        Entry(mine.author, 100, 10, 0, 1.0, OWN),
        Entry(other.author, 300, 10, 0, 3.0, 0),
    }


def test_a_round_that_is_merged_anew_costs_what_is_new_in_it(chronicle: Chronicle) -> None:
    """Each delta of a thousand was looked for among all others, at each merge."""
    deltas = [delta(author, 1) for author in range(400)]
    assert calls(lambda: heard(chronicle, *deltas)) < 40 * len(deltas)
    merged(chronicle, *deltas)
    late = delta(400, 1)
    assert calls(lambda: merged(chronicle, *deltas, late)) < 2 * len(deltas)
    authors = [entry.author for entry in row(chronicle, 1).entries]
    assert authors == sorted({each.author for each in (*deltas, late)})


def test_a_late_record_costs_no_look_at_all_that_came_after_it() -> None:
    """What every later round shows changes with it; what the deltas of those count for does not."""

    def cost(rounds: int) -> int:
        chronicle, authors = Chronicle(ME, ONE), range(40)
        for round_ in range(1, rounds + 1):
            merged(chronicle, *(delta(author, round_) for author in authors))
        chronicle.settle(0, 0)
        before = row(chronicle, rounds).merged_tokens
        assert before is not None
        merged(chronicle, *(delta(author, 1) for author in authors), delta(99, 1, tokens=7))
        work = calls(lambda: chronicle.settle(0, 0))
        assert row(chronicle, rounds).merged_tokens == before + 7
        return work

    assert cost(150) - cost(50) < 100 * 20


def test_a_new_round_costs_no_look_at_the_stretches_before_it() -> None:
    """Where nothing is ever closed they are thousands after a day, and it was each of them, each second."""
    setting = manifest(fragments=1, history={"snapshot_every": 1, "seal_after": 1, "retain": 0})

    def cost(rounds: int) -> int:
        chronicle = Chronicle(ME, setting)
        for round_ in range(1, rounds + 1):
            merged(chronicle, delta(0, round_, tokens=10))
        chronicle.settle(0, 0)
        merged(chronicle, delta(0, rounds + 1, tokens=10))
        work = calls(lambda: chronicle.settle(0, 0))
        assert row(chronicle, rounds + 1).merged_tokens == 10 * (rounds + 1)
        return work

    assert cost(150) - cost(50) < 10


def test_late_is_what_came_after_a_later_round_was_merged(chronicle: Chronicle) -> None:
    first, second, late = delta(1, 1), delta(1, 2), delta(2, 1)
    heard(chronicle, first)
    merged(chronicle, first)
    heard(chronicle, delta(3, 1))
    heard(chronicle, second)
    merged(chronicle, second)
    heard(chronicle, late)
    assert flags(chronicle, 1) == {first.author: 0, delta(3, 1).author: 0, late.author: LATE}
    catching_up = delta(4, 1)
    chronicle.heard(catching_up, unix_s=7.0, clock=100, live=False)
    assert flags(chronicle, 1)[catching_up.author] == 0, "a node that catches up hears everything late"


def test_a_round_names_as_many_authors_as_a_swarm_has_and_no_more(
    chronicle: Chronicle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys cost nothing, and whoever has made thousands could fill the memory of every node."""
    monkeypatch.setattr(chronicles, "MEMBERS_MAX", 3)
    heard(chronicle, *(delta(author, 7) for author in range(5)))
    assert flags(chronicle, 7).keys() == {delta(author, 7).author for author in range(3)}


def test_void_and_clipped_deltas_are_marked_and_do_not_count(chronicle: Chronicle) -> None:
    liar, broken, long, good = (
        delta(1, 1, loss=9.0),
        delta(2, 1),
        delta(3, 1, loss=2.0),
        delta(4, 1, loss=2.0),
    )
    heard(chronicle, liar, broken, long, good)
    figures = {
        broken.author: Figures(void=True),
        long.author: Figures(clipped=4.0, pace=4.0),
        good.author: Figures(clipped=1.6, pace=1.0),
    }
    merged(chronicle, broken, long, good, void=[liar.author], figures=figures, agreement=0.25)
    assert flags(chronicle, 1) == {
        liar.author: VOID,
        broken.author: VOID,
        long.author: CLIPPED,
        good.author: 0,
    }
    assert row(chronicle, 1).tokens == 2000 and row(chronicle, 1).loss == 2.0
    merged(chronicle, long, good)
    assert row(chronicle, 1).agreement == 0.25, (
        "a merge that changed nothing found nothing, and takes nothing back"
    )
    merged(chronicle, long, good, figures={long.author: Figures(), good.author: Figures()}, agreement=0.3)
    assert flags(chronicle, 1)[long.author] == 0, "beside more deltas it is not too long any more"
    heard(chronicle, delta(5, 1))
    chronicle.heard(delta(5, 1), unix_s=1.0, clock=100, void=True)
    assert flags(chronicle, 1)[delta(5, 1).author] == VOID


def test_merged_tokens_are_the_sum_of_all_that_is_merged_up_to_a_round(chronicle: Chronicle) -> None:
    for round_ in (11, 12, 13):
        merged(chronicle, delta(1, round_, tokens=10))
    chronicle.settle(10, 1000)
    assert [found.merged_tokens for found in rounds_of(chronicle)] == [1010, 1020, 1030]
    chronicle.take_changed()
    merged(chronicle, delta(1, 12, tokens=10), delta(2, 12, tokens=5))
    chronicle.settle(10, 1000)
    assert [found.merged_tokens for found in rounds_of(chronicle)] == [1010, 1025, 1035]
    assert [found.number for found in chronicle.take_changed()] == [12, 13]
    merged(chronicle, delta(1, 14, tokens=10))
    chronicle.settle(13, 1035)
    assert [found.merged_tokens for found in rounds_of(chronicle)] == [1010, 1025, 1035, 1045], (
        "closing is no loss"
    )
    chronicle.take_changed()
    chronicle.settle(13, 1035)
    assert chronicle.take_changed() == []


def test_the_deltas_of_closed_rounds_are_kept_no_longer(chronicle: Chronicle) -> None:
    """Or the memory of a node would grow with the swarm's history."""
    closed = delta(1, 11, tokens=10)
    before = sys.getrefcount(closed)
    merged(chronicle, closed)
    chronicle.settle(10, 1000)
    merged(chronicle, delta(1, 12, tokens=10))
    chronicle.settle(11, 1010)
    assert sys.getrefcount(closed) == before


def test_merged_tokens_after_a_snapshot_was_adopted_go_on_from_its_own(chronicle: Chronicle) -> None:
    merged(chronicle, delta(1, 11, tokens=10))
    chronicle.settle(10, 1000)
    merged(chronicle, delta(1, 61, tokens=10))
    chronicle.settle(60, 50_000)
    assert row(chronicle, 61).merged_tokens == 50_010


def test_merged_tokens_are_what_the_records_up_to_a_round_count_for(chronicle: Chronicle) -> None:
    """As a claim for that round would say, whatever somebody states."""
    liar = delta(9, 12, tokens=2**40)
    heard(chronicle, *(delta(1, round_, tokens=10) for round_ in (11, 12, 13)), liar)
    merged(chronicle, delta(1, 11, tokens=10))
    merged(chronicle, delta(1, 12, tokens=10), liar)
    merged(chronicle, delta(1, 13, tokens=10))
    chronicle.settle(10, 1000)
    assert [found.merged_tokens for found in rounds_of(chronicle)] == [1010, 1060, 1070]
    merged(chronicle, delta(1, 14, tokens=10))
    merged(chronicle, delta(1, 17, tokens=10))
    chronicle.settle(10, 1000)
    merged(chronicle, delta(1, 17, tokens=10), delta(2, 17, tokens=10))
    chronicle.settle(10, 1000)
    assert [found.merged_tokens for found in rounds_of(chronicle)] == [1010, 1060, 1070, 1080, 1100]


@pytest.mark.parametrize("seed", range(20))
def test_merged_tokens_do_not_depend_on_when_they_were_settled(seed: int) -> None:
    """Late deltas, deltas that turn out void, closed rounds: as if all had been merged at once."""
    rng = random.Random(seed)
    every = rng.choice((1, 3, 16))
    setting = manifest(fragments=1, history={"snapshot_every": every, "seal_after": 1, "retain": 0})
    chronicle, base, below = Chronicle(ME, setting), 0, 0
    deltas: dict[int, tuple[Delta, ...]] = {}

    def told(several: Chronicle) -> list[tuple[int, int | None]]:
        return [(found.number, found.merged_tokens) for found in rounds_of(several, base + 1)]

    for _ in range(30):
        for round_ in {base + 1 + rng.randrange(3 * every + 3) for _ in range(rng.randrange(1, 4))}:
            authors = rng.sample(range(1, 6), rng.randrange(1, 6))
            deltas[round_] = tuple(delta(i, round_, tokens=rng.choice((1, 10, 2**40))) for i in authors)
            merged(chronicle, *deltas[round_])
        chronicle.settle(base, below)
        fresh = Chronicle(ME, setting)
        for round_ in sorted(deltas):
            merged(fresh, *deltas[round_])
        fresh.settle(base, below)
        assert told(chronicle) == told(fresh)
        if rng.random() < 0.2:
            closed = [round_ for round_ in deltas if round_ <= base + every]
            below += TokenCount(setting, (each for round_ in closed for each in deltas.pop(round_))).total
            base += every


def test_one_liar_does_not_make_the_loss_of_a_round(chronicle: Chronicle) -> None:
    honest = [delta(author, 1, loss=2.0 + author / 10, tokens=1000) for author in range(1, 4)]
    liar = delta(9, 1, loss=-1e6, tokens=2**40)
    heard(chronicle, *honest, liar)
    assert row(chronicle, 1).loss == pytest.approx(2.15)


def test_old_rounds_make_room_and_a_liar_cannot_clear_them_away(
    chronicle: Chronicle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chronicles, "ROUNDS_MAX", 3)
    heard(chronicle, *(delta(1, round_) for round_ in (1, 2, 3, 4)), clock=4)
    assert [found.number for found in rounds_of(chronicle)] == [2, 3, 4] and chronicle.begins_after == 1
    heard(chronicle, delta(2, 4 + chronicles.AHEAD_MAX + 1), delta(2, 1), clock=4)
    assert [found.number for found in rounds_of(chronicle)] == [2, 3, 4]
    monkeypatch.setattr(chronicles, "ENTRIES_MAX", 4)
    heard(chronicle, delta(2, 4), delta(3, 4), clock=4)
    assert [found.number for found in rounds_of(chronicle)] == [3, 4]
    assert [found.number for found in rounds_of(chronicle, 4)] == [4]


def test_making_room_costs_no_look_at_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner hears of many times as many as are kept, one after another."""

    class Number(int):
        def __lt__(self, other: int) -> bool:
            return int(self) < int(other)

    def cost(rounds: int) -> int:
        monkeypatch.setattr(chronicles, "ROUNDS_MAX", rounds)
        chronicle = Chronicle(ME, ONE)
        heard(chronicle, *(delta(1, Number(n)) for n in range(1, rounds + 1)), clock=rounds)
        work = calls(lambda: heard(chronicle, delta(1, Number(rounds + 1)), clock=rounds))
        assert (chronicle.begins_after, chronicle.oldest()) == (1, 2)
        return work

    assert cost(800) - cost(100) < 20


def test_json_names_every_author_once(chronicle: Chronicle) -> None:
    heard(chronicle, delta(0, 1), delta(1, 1), delta(1, 2))
    merged(chronicle, delta(1, 2, loss=1.23456789), agreement=0.123456, figures={})
    told = as_json(rounds_of(chronicle), LAYOUT)
    authors = [bytes.fromhex(author) for author in told["authors"]]
    assert sorted(authors) == sorted([ME, delta(1, 1).author])
    first, second = told["rounds"]
    assert first[:6] == [1, 5.0, 2.5, 2000, None, None]
    assert second[:6] == [2, 5.0, 2.5, 1000, None, 0.1235]
    assert [authors[entry[0]] for entry in first[6]] == sorted(authors)
    assert second[6] == [[authors.index(delta(1, 1).author), 1000, 10, 0, 2.5, 0]]


def test_json_tells_tokens_trained_however_many_fragments_there_are(chronicle: Chronicle) -> None:
    """What is kept adds up windows, as claims do: so did the files of earlier releases."""
    merged(chronicle, delta(1, 11, tokens=400))
    chronicle.settle(10, 8000)
    assert row(chronicle, 11).merged_tokens == 8400
    for fragments in (1, 2, 4):
        (told,) = as_json(rounds_of(chronicle), manifest(fragments=fragments).plan())["rounds"]
        assert told[3:5] == [400, 8400 // fragments]


# -- on disk


def test_it_is_kept_over_restarts(tmp_path: Path, chronicle: Chronicle) -> None:
    heard(chronicle, delta(0, 1), delta(1, 1), delta(1, 2))
    merged(chronicle, delta(1, 2), figures={}, agreement=0.5)
    chronicle.settle(0, 2**63)
    store = ChronicleStore(tmp_path / "c.sqlite")
    assert store.load() == ([], 0) and store.oldest() is None
    rounds = chronicle.take_unsaved()
    assert [found.number for found in rounds] == [1, 2] and chronicle.take_unsaved() == []
    store.save(rounds)
    store.close()
    again = Chronicle(ME, ONE)
    store = ChronicleStore(tmp_path / "c.sqlite")
    again.restore(*store.load())
    kept = rounds_of(again)
    assert kept[0] == chronicle.at(1)
    held = row(chronicle, 2)._replace(merged_tokens=2**63 - 1)
    assert kept[1] == held, "no database holds what liars claim"
    store.close()


def test_the_oldest_are_looked_for_now_and_then_and_not_at_every_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a look at all rounds kept."""
    monkeypatch.setattr(stores, "ROUNDS_MAX", 20)
    monkeypatch.setattr(stores, "DROP_EVERY", 10)
    store = ChronicleStore(tmp_path / "c.sqlite")
    looked: list[str] = []

    def note(statement: str) -> None:
        if "OVER newest" in statement:
            looked.append(statement)

    store.load()
    assert store._db is not None
    store._db.set_trace_callback(note)
    for number in range(1, 101):
        store.save([Round(number, 1.0, number, None, ())])
        assert len(kept_in(store, 0, 1000)) < 20 + 10
    assert len(looked) == 10
    store.close()
    store = ChronicleStore(tmp_path / "c.sqlite")
    store.save([])
    assert len(kept_in(store, 0, 1000)) == 20, "what an earlier run left"
    store.close()


def test_the_disk_reaches_further_back_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ChronicleStore(tmp_path / "c.sqlite")
    rounds = [Round(n, 1.0, n, None, (Entry(bytes([n]) * 32, 1, 1, 0, 2.0, 0),)) for n in range(1, 9)]
    store.save(rounds)
    monkeypatch.setattr(stores, "ENTRIES_MAX", 3)
    kept, begins_after = store.load()
    assert kept == rounds[5:] and begins_after == 5
    assert kept_in(store, 2, begins_after) == rounds[1:5] and store.oldest() == 1
    again = Chronicle(ME, ONE)
    again.restore(kept, begins_after)
    heard(again, delta(1, 5))
    assert [found.number for found in rounds_of(again)] == [6, 7, 8], "what is on disk is not begun anew"
    monkeypatch.setattr(stores, "DROP_EVERY", 0)
    monkeypatch.setattr(stores, "ROUNDS_MAX", 6)
    store.save([])
    assert store.oldest() == 3
    monkeypatch.setattr(stores, "STORED_BYTES_MAX", 2 * len(stores._pack(rounds[0])))
    store.save([])
    assert kept_in(store, 0, 100) == rounds[6:]
    store.close()


def test_a_damaged_file_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"not a database, but long enough to look like one to whoever opens it" * 100)
    store = ChronicleStore(path)
    with caplog.at_level(logging.WARNING):
        assert store.load() == ([], 0)
    assert "earlier rounds are not known" in caplog.text
    store.save([Round(1, 1.0, None, None, ())])
    assert [found.number for found in store.load()[0]] == [1]
    store.close()


def test_a_file_that_another_process_has_locked_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LOCKED_S", 0.01)
    path = tmp_path / "c.sqlite"
    store = ChronicleStore(path)
    store.save([Round(1, 1.0, None, None, ())])
    store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        assert store.load() == ([], 0)
    assert [found.number for found in store.load()[0]] == [1]
    store.close()


def test_rows_that_cannot_be_read_are_damage_too(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    store = ChronicleStore(path)
    store.save([Round(1, 1.0, None, None, ())])
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE rounds SET entries = x'ff00'")
    db.close()
    store = ChronicleStore(path)
    assert store.load() == store.load() == ([], 0)
    store.close()


def test_what_cannot_be_written_is_kept_for_the_next_time(tmp_path: Path, chronicle: Chronicle) -> None:
    heard(chronicle, delta(0, 1))
    store = ChronicleStore(tmp_path / "missing" / "c.sqlite")
    rounds = chronicle.take_unsaved()
    with pytest.raises(StorageError, match="cannot write"):
        store.save(rounds)
    chronicle.not_saved(rounds)
    heard(chronicle, delta(0, 2))
    assert [found.number for found in chronicle.take_unsaved()] == [1, 2]
    store.close()


def test_what_a_full_disk_had_no_room_to_begin_is_begun_once_there_is(
    tmp_path: Path, chronicle: Chronicle, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(sqlite3.Connection):
        def executescript(self, script: str) -> sqlite3.Cursor:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    store = ChronicleStore(tmp_path / "chronicle.sqlite")
    heard(chronicle, delta(0, 1))
    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(stores.sqlite3, "connect", lambda path, **how: connect(path, factory=Full, **how))
        assert store.load() == ([], 0)
    store.save(chronicle.take_unsaved())
    store.close()
    again = ChronicleStore(tmp_path / "chronicle.sqlite")
    assert [found.number for found in again.load()[0]] == [1]
    again.close()


def evaluated(round_: int, loss: float | None, version: int | None = None) -> Report:
    version = round_ if version is None else version
    return report(val_loss=loss, evaluated_version=version, evaluated_round=round_)


def test_held_out_losses_are_kept_once_each_and_over_restarts(tmp_path: Path) -> None:
    path, evaluations = tmp_path / "c.sqlite", Evaluations()
    evaluations.look(None)
    for round_, loss, version in ((0, 5.0, 0), (0, 5.0, 0), (5, 4.0, 7), (6, float("nan"), 8), (7, None, 9)):
        evaluations.look(evaluated(round_, loss, version))
    assert evaluations.to_json() == {"version": 8, "losses": [[0, 5.0], [5, 4.0]]}
    store = ChronicleStore(path)
    store.save([], evaluations.take_unsaved())
    store.close()
    assert evaluations.take_unsaved() == {}
    again, store = Evaluations(), ChronicleStore(path)
    again.restore(store.load_evaluations())
    store.close()
    again.look(evaluated(5, 4.0, 7))  # a trainer that lived on tells the next daemon the same
    assert again.to_json() == {"version": 7, "losses": [[0, 5.0], [5, 4.0]]}
    assert again.take_unsaved() == {}


def test_old_held_out_losses_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.node.daemon.monitoring.round_history.EVALUATIONS_MAX", 2)
    monkeypatch.setattr("gossamer.node.daemon.monitoring.round_history.EVALUATIONS_MAX", 2)
    evaluations, store = Evaluations(), ChronicleStore(tmp_path / "c.sqlite")
    for number in range(5):
        evaluations.look(evaluated(number, 1.0))
    assert evaluations.to_json()["losses"] == [[3, 1.0], [4, 1.0]]
    store.save([], evaluations.take_unsaved())
    assert store.load_evaluations() == [(3, 1.0), (4, 1.0)]
    store.close()


def test_held_out_losses_that_cannot_be_written_or_read_are_no_fault(tmp_path: Path) -> None:
    store, evaluations = ChronicleStore(tmp_path / "missing" / "c.sqlite"), Evaluations()
    assert store.load_evaluations() == []
    evaluations.look(evaluated(1, 3.0))
    unsaved = evaluations.take_unsaved()
    with pytest.raises(StorageError, match="cannot write"):
        store.save([], unsaved)
    evaluations.look(evaluated(2, 2.0))
    evaluations.not_saved(unsaved)
    assert evaluations.take_unsaved() == {1: 3.0, 2: 2.0}
    store.close()
