"""A daemon and a revocation: Phi is rid of what is void, also after a restart and in the folder alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gossamer.node.daemon.daemon import Daemon, unix_offset_s
from gossamer.node.daemon.network.rpc import Asker, deliver, fetch_status
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.restore import replay
from gossamer.node.home import keep_better
from gossamer.protocol import events as ev
from gossamer.protocol.access.acl import Invitation, Role, parse_grant
from gossamer.protocol.effects import StoreCredential
from gossamer.protocol.errors import ConfigError, NotAnsweredError, UnreachableError
from gossamer.protocol.history.claims import genesis_claim
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.records import Claim, Delta, open_envelope
from tests.node import folders
from tests.node.chunkfiles import file_of
from tests.node.daemons import PHI, SPECS, started
from tests.node.trainer_side import until
from tests.protocol import builders
from tests.protocol.builders import grant, identity, random_delta, revocation

FRIEND, OUTCAST = identity(50), identity(51)


def manifest(mode: str) -> Manifest:
    return builders.manifest(
        SPECS,
        1,
        genesis={"digest": snapshots.digest(PHI).hex()},
        swarm={"name": "n", "created": int(time.time()) - 3600},
        admission=builders.admission(mode),
    )


def invitation(of: Manifest, node: Identity, **changes: object) -> Invitation:
    data = grant(node, of, **changes)  # type: ignore[arg-type]
    return Invitation(of.swarm_id, parse_grant(open_envelope(data, of.swarm_id)), ())


class Folder(folders.Folder):
    """A node's folder that holds the first model and records of others."""

    def __init__(self, path: Path, of: Manifest) -> None:
        super().__init__(path, of, PHI)
        self.identity = self.home.identity()

    def add_of(self, author: Identity, round_: int, seed: int = 0) -> Delta:
        rng = np.random.default_rng(round_ + author.node_id[0] + 1000 * seed)
        delta, payload = random_delta(rng, author, round_, of=self.manifest)
        self.add((delta, payload))
        return delta

    @contextlib.asynccontextmanager
    async def running(self, *, trains: bool = False, join: tuple[str, ...] = ()) -> AsyncIterator[Daemon]:
        async with started(self.home, observe=not trains, join=join) as (daemon, task):
            await until(lambda: daemon.phi.loop.ready or task.done())
            yield daemon


async def digests(daemon: Daemon) -> tuple[bytes, bytes]:
    await until(lambda: not daemon.core.rounds_behind)
    daemon.phi.loop._digest_until = 0.0  # where it took long, it is the one of a moment ago for as long
    found = await daemon.phi.loop.digest()
    assert found is not None
    return found.merged, found.phi


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "d", manifest("open"))


async def test_a_delta_that_became_void_as_its_node_stopped_is_taken_out_at_the_next_start(
    folder: Folder, tmp_path: Path
) -> None:
    """The newest snapshot holds it; the proof of equivocation came before that was written anew."""
    kept, void = folder.add_of(FRIEND, 1), folder.add_of(OUTCAST, 2)
    _, state = replay(folder.home)
    root = folders.sealed(state, 2, genesis_claim(folder.manifest.genesis.root), folder.chunks)
    with folder.records() as store:
        claim = Claim(2, state.tokens, state.chain(), root)
        store.add_snapshot(claim, [kept, void], ())
    folder.add_of(OUTCAST, 2, seed=1)
    expected = await without_the_outcast(folder, tmp_path / "other", 1)
    assert replay(folder.home)[1].digest() == expected[1]
    async with folder.running() as daemon:
        assert await digests(daemon) == expected


async def test_a_revoked_delta_whose_payload_was_damaged_on_disk_is_fetched_again_and_taken_out(
    folder: Folder, tmp_path: Path
) -> None:
    folder.add_of(FRIEND, 1)
    void = folder.add_of(OUTCAST, 2)
    expected = await without_the_outcast(folder, tmp_path / "other", 1)
    (blob,) = void.body.chunks
    async with folder.running() as daemon:
        await digests(daemon)
        path, sound = file_of(daemon.store.chunks, blob), daemon.store.chunks.get(blob)
        path.write_bytes(bytes(path.stat().st_size))
        daemon.phi.loop._state._payloads._recent.clear()  # type: ignore[union-attr]
        daemon.phi.loop._state._steps.clear()  # type: ignore[union-attr]
        daemon.dispatch(ev.Deliver(revocation(OUTCAST, folder.manifest)))
        await until(lambda: void.record_id in daemon.core.fetcher.wants)
        daemon.store.chunks.put(blob, sound)
        daemon.dispatch(ev.ChunkArrived(blob))
        assert await digests(daemon) == expected


async def without_the_outcast(folder: Folder, path: Path, *rounds: int) -> tuple[bytes, bytes]:
    """Digests of a replica that never heard of it."""
    other = Folder(path, folder.manifest)
    for round_ in rounds:
        other.add_of(FRIEND, round_)
    async with other.running() as daemon:
        return await digests(daemon)


async def test_phi_is_rid_of_what_is_void_now_and_after_a_restart(folder: Folder, tmp_path: Path) -> None:
    for round_ in (1, 2, 4):
        folder.add_of(FRIEND, round_)
    for round_ in (2, 3, 4):
        folder.add_of(OUTCAST, round_)  # in round 3 nobody else
    async with folder.running() as daemon:
        before = await digests(daemon)
        assert len(daemon.core.ledger) == 6
        daemon.dispatch(ev.Deliver(revocation(OUTCAST, folder.manifest)))
        after = await digests(daemon)
        assert len(daemon.core.ledger) == 3
        await daemon.store.writer.drained()
    expected = await without_the_outcast(folder, tmp_path / "other", 1, 2, 4)
    assert after == expected != before
    async with folder.running() as daemon:
        assert await digests(daemon) == expected
    assert replay(folder.home)[1].digest() == expected[1]


async def test_a_snapshot_that_holds_what_is_void_is_corrected_by_a_restart(
    folder: Folder, tmp_path: Path
) -> None:
    """The node stopped after it had stored the revocation and before Phi on its disk was written anew."""
    deltas = [folder.add_of(FRIEND, 1), folder.add_of(OUTCAST, 1), folder.add_of(OUTCAST, 2)]
    _, state = replay(folder.home)
    root = folders.sealed(state, 2, genesis_claim(folder.manifest.genesis.root), folder.chunks)
    claim = Claim(2, state.tokens, state.chain(), root)
    with folder.records() as store:
        store.add_snapshot(claim, deltas, ())
        store.add([StoreCredential(bytes(32), revocation(OUTCAST, folder.manifest))])
    expected = await without_the_outcast(folder, tmp_path / "other", 1)
    assert replay(folder.home)[1].digest() == expected[1]
    async with folder.running() as daemon:
        assert await digests(daemon) == expected


async def test_payloads_of_what_is_void_go_with_their_round(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.protocol.history.joining.RETURN_S", 0.0)
    kept, void = folder.add_of(FRIEND, 3), folder.add_of(OUTCAST, 1)
    async with folder.running() as daemon:
        daemon.dispatch(ev.Deliver(revocation(OUTCAST, folder.manifest)))
        await digests(daemon)
        assert all(blob in folder.chunks for blob in void.body.chunks), "another merge may need it"
        daemon.core.holdings.close(2)
        daemon.carry_out(daemon.core.outbox.drain())
        await until(lambda: not any(blob in daemon.store.chunks for blob in void.body.chunks))
        assert all(blob in daemon.store.chunks for blob in kept.body.chunks)
        await until(lambda: daemon.phi.archive._closing is None)
    with folder.records() as store:
        assert [delta.record_id for delta in store.load(folder.manifest.plan())] == [kept.record_id]


async def test_a_node_that_is_revoked_ends_and_does_not_come_back(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="an owner of this swarm has revoked this node: key stolen"):
        async with folder.running() as daemon:
            facts = folder.home.read_daemon()
            assert facts is not None
            record = revocation(folder.identity, folder.manifest, reason="key stolen")
            await deliver(facts["address"], record, plaintext=True)
            await until(daemon._stopping.is_set)
    with pytest.raises(ConfigError, match="was revoked by an owner of this swarm: key stolen$"):
        async with folder.running():
            pass


async def test_a_grant_to_a_revoked_node_is_refused_where_an_owner_hands_it_over(folder: Folder) -> None:
    async with folder.running() as daemon:
        facts = folder.home.read_daemon()
        assert facts is not None
        await deliver(facts["address"], revocation(OUTCAST, folder.manifest, reason="stolen"), plaintext=True)
        late = grant(OUTCAST, folder.manifest)
        said = "refuses: node .* was revoked by an owner of this swarm: stolen$"
        with pytest.raises(NotAnsweredError, match=said):
            await deliver(facts["address"], late, plaintext=True)
        assert late not in [record.data for record in daemon.core.acl.records()]
        await deliver(facts["address"], grant(FRIEND, folder.manifest), plaintext=True)
        daemon.dispatch(ev.Deliver(late))
        assert late in [record.data for record in daemon.core.acl.records()], "it is a set, as ever"


async def test_an_invited_node_answers_its_members_and_keeps_what_it_hears(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "d", manifest("invited"))
    folder.home.keep_invitation(invitation(folder.manifest, folder.identity, role=Role.OBSERVE))
    later = grant(FRIEND, folder.manifest)
    async with folder.running() as daemon:
        facts = folder.home.read_daemon()
        assert facts is not None
        with pytest.raises(NotAnsweredError, match="members only"):
            await fetch_status(facts["address"], plaintext=True)
        with pytest.raises(NotAnsweredError, match="not an owner"):
            await deliver(facts["address"], grant(FRIEND, folder.manifest, by=FRIEND), plaintext=True)
        await deliver(facts["address"], later, plaintext=True)
        assert daemon.core.acl.role_of(FRIEND.node_id) is Role.TRAIN
        swarm_id = folder.manifest.swarm_id
        with pytest.raises(NotAnsweredError, match="refuses: .* invited"):
            await fetch_status(facts["address"], plaintext=True, asker=Asker(OUTCAST, swarm_id))
        said = await fetch_status(facts["address"], plaintext=True, asker=Asker(FRIEND, swarm_id))
        assert said["node_id"] == folder.identity.node_id.hex()
        await daemon.store.writer.drained()
    with folder.records() as store:
        assert store.load_credentials() == [later]
    async with folder.running() as daemon:
        assert daemon.core.acl.role_of(FRIEND.node_id) is Role.TRAIN


async def test_a_node_that_is_stopping_takes_no_grant_that_it_might_not_keep(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, left = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        leaving.set()
        await left.wait()

    async with folder.running() as daemon:
        facts = folder.home.read_daemon()
        assert facts is not None
        monkeypatch.setattr(daemon, "_take_leave", slowly)
        daemon.stop()
        try:
            async with asyncio.timeout(60):
                await leaving.wait()
            with pytest.raises(UnreachableError, match="cannot answer: this node is stopping; use another"):
                await deliver(facts["address"], grant(FRIEND, folder.manifest), plaintext=True)
        finally:
            left.set()
    with folder.records() as store:
        assert store.load_credentials() == []


async def test_what_an_owner_gives_a_running_node_is_what_its_next_start_goes_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Promoted by one and renewed by another; what gives less comes too late, in whatever order."""
    caplog.set_level(logging.INFO)
    folder, now = Folder(tmp_path / "d", manifest("invited")), int(time.time())
    home, own = folder.home, folder.identity
    first = invitation(folder.manifest, own, role=Role.OBSERVE, expires=now + 1800)
    home.keep_invitation(replace(first, contacts=("a:1",)))

    def kept() -> Invitation:
        found = home.invitation()
        assert found is not None and found.contacts == ("a:1",)
        return found

    promoted, renewed, older = (
        grant(own, folder.manifest, expires=now + lasts_s, role=role)
        for lasts_s, role in ((1800, Role.TRAIN), (7200, Role.TRAIN), (3600, Role.OBSERVE))
    )
    async with folder.running() as daemon:
        for credential in (promoted, grant(FRIEND, folder.manifest), renewed, older):
            daemon.dispatch(ev.Deliver(credential))
            if credential is promoted:
                await until(lambda: kept().grant.data == promoted)
        await until(lambda: kept().grant.data == renewed)
        keep_better(home, first)  # as `gossamer node` with the line that the newcomer was sent
        assert kept().grant.data == renewed
    home.keep_invitation(replace(first, contacts=("a:1",)))  # as earlier releases left it
    async with folder.running():
        assert kept().grant.data == renewed
    home.invitation_path.write_text("damaged")
    keep_better(home, replace(first, contacts=("a:1",)))
    assert kept() == replace(first, contacts=("a:1",))
    assert "older invitation" not in caplog.text


async def test_a_node_knows_until_when_it_is_let_in_and_why_it_is_not(tmp_path: Path) -> None:
    folder, ends = Folder(tmp_path / "d", manifest("invited")), int(time.time()) + 7200
    folder.home.keep_invitation(invitation(folder.manifest, folder.identity, expires=ends))
    async with folder.running() as daemon:
        status = daemon.monitor.read()
        assert (status.invited_until, status.vitals.refusal, status.vitals.has_model) == (ends, "", True)
        daemon.core._unix_time.set_offset(unix_offset_s() + 3 * 7200)
        assert "ran out 4.0 hours ago; ask an owner for a new one" in daemon.monitor.read().vitals.refusal


@pytest.mark.parametrize(
    ("changes", "trains", "said"),
    [
        (None, False, "lets in invited nodes only.*--invite INVITATION"),
        ({"expires": 1000}, False, "ran out .* days ago.*--invite INVITATION"),
        ({"by": FRIEND}, False, "lets in invited nodes only"),
        (
            {"role": Role.OBSERVE},
            True,
            "invited to observe, not to train; start it with gossamer node --observe",
        ),
    ],
    ids=["no invitation", "expired", "not by an owner", "an observer that wants to train"],
)
async def test_a_node_that_nobody_would_let_in_says_so_and_ends(
    tmp_path: Path, changes: dict[str, object] | None, trains: bool, said: str
) -> None:
    folder = Folder(tmp_path / "d", manifest("invited"))
    if changes is not None:
        folder.home.keep_invitation(invitation(folder.manifest, folder.identity, **changes))
    with pytest.raises(ConfigError, match=said):
        async with folder.running(trains=trains):
            pass
