"""Every bound of the protocol, by name, with its reason.

Nothing that arrives from the network may grow without one of these. Sizes are bytes, times are seconds.

The bounds that decide which bytes are valid bind all nodes: the sections *records* and *manifest*, and the
sizes of credentials and messages. Changing one of them makes another wire protocol. The rest is a node's own
patience and appetite, and may differ from node to node.
"""

# --- records ---------------------------------------------------------------------------------------
RECORD_BYTES_MAX = 64 * 1024
"""One signed envelope. A delta over 1 GiB of payload lists 1,024 chunk hashes: 32 KiB."""

CHUNK_BYTES_MAX = 1024 * 1024
"""Blobs are cut and hashed in pieces of this size: one hash check bounds what a liar can make us hold."""

PAYLOAD_CHUNK_BYTES_MIN = 256 * 1024
"""A payload is cut finer than a snapshot, but not so fine that requests cost much: 430 bytes each."""

SENT_ALONG_BYTES_MAX = PAYLOAD_CHUNK_BYTES_MIN
"""Payloads that an author sends along with their records, all copies of one together: a line of 140 kbit/s
carries that many in 15 s, before its links pass for silent (LINK_SILENCE_S)."""

PAYLOAD_CHUNKS_AIM = 64
"""A payload has no more chunks than this until they are CHUNK_BYTES_MAX long: 2 KiB of its record."""

PAYLOAD_CHUNKS_MAX = 1024
"""Chunks of one delta (1 GiB): one fragment of a 2 G parameter model at int4."""

COUNTER_MAX = 2**53
"""The bound of plain counters: heartbeats, steps, pings. A double still holds it exactly."""

UNIX_S_MAX = 2**40

ROUND_MAX = 2**31 - 1
TOKENS_MAX = 2**40
"""Tokens of one window. A thousand GPUs at a million a second for 10 minutes make 2**39."""

TOKENS_TOTAL_MAX = 2**63 - 1
"""Tokens of all deltas together; a larger sum counts as this. Liars get there with 2**23 records."""

OWN_TOKENS_MAX = 2**60
"""Tokens of one node over all its runs, as its record states them; a larger sum counts as this."""

STEPS_MAX = 2**24

WINDOW_MS_MAX = 2**32
"""Seven weeks."""
TURN_MAX = 2**16 - 1
"""Once in 1024 rounds, see `sampling.is_drawn`."""
STALENESS_MAX = 2**20
LOSS_MAX = 1e6
CLAIM_BYTES_MAX = 160
"""The blocks of the data that one delta claims, packed: 1 % of a topk payload of a million parameters. A node
that goes through the data block after block claims some 20 runs of them with it, of any length."""

EPOCH_MAX = 2**31 - 1
TOKENS_PER_S_MAX = 1e15

# --- manifest ----------------------------------------------------------------------------------------
MANIFEST_BYTES_MAX = 4 * 1024 * 1024
TENSORS_MAX = 20_000
TENSOR_DIMS_MAX = 8
FRAGMENTS_MAX = 256
PARAMETERS_MAX = (CHUNK_BYTES_MAX // 32 - 2) * CHUNK_BYTES_MAX // 4
"""8 G: a snapshot's list of hashes, with the roots of its two sums, is itself one chunk."""

TEXT_BYTES_MAX = 256
"""Names, devices, versions, reasons: anything a person will read in one line."""

BLOCKS_MAX = 1 << 16
"""Blocks of the data. A map of which are claimed has 8 KiB; a snapshot holds three, and a trainer hears of
each change."""

SAMPLES_MAX = 2**48

# --- admission ------------------------------------------------------------------------------------------
OWNERS_MAX = 16
CREDENTIAL_BYTES_MAX = 1024
"""A grant or a revocation in its envelope; the reason is the longest thing in it."""

REASON_BYTES_MAX = 160
"""Reason of a revocation: with the words around it, it fits a text of TEXT_BYTES_MAX."""

ACL_NODES_MAX = 4096
"""Node ids that grants and revocations may speak of, one each in force. Only owners can fill this."""

EXPIRY_CHECK_INTERVAL_S = 4.0
"""A member's link is cut within 5 s of the end of its invitation."""

ASK_FRESH_S = 300.0
"""A signed question is answered for this long: clocks of people's machines differ by minutes."""

# --- links and messages --------------------------------------------------------------------------------
MESSAGE_BYTES_MAX = 2 * 1024 * 1024 + 64 * 1024
"""One WebSocket message: RECORDS_PER_MESSAGE_MAX records of the largest size, and their framing."""

ARRAYS_MAX = 4096
"""Arrays in one msgpack value, nested ones included: an empty one is one byte on the wire, 64 in memory."""

RECORDS_PER_MESSAGE_MAX = 32
"""Signatures are checked on the event loop, about 0.1 ms each: 32 keep a message under 4 ms."""

IDS_PER_MESSAGE_MAX = 1024
IDS_PER_ROUND_MAX = 2048
"""Record ids of one round in a message: two, the proof of equivocation, from each of MEMBERS_MAX."""

ADDRESSES_PER_PEER_MAX = 8
MEMBERS_MAX = 1024
"""Members that a node knows; above the limit, those that are gone make room first."""

AUTHORS_KEPT = 4 * MEMBERS_MAX
"""Authors whose last round we remember. More stay only as members, or while their rounds are open."""

LINKS_MAX = 64
"""A node wants few links, but takes in many: it may be the only one that others can reach."""

LINKS_WANTED = 6
LINKS_MIN = 4
LINKS_OUTBOUND_MIN = 2
"""Links that we chose ourselves: a peer that fills all places open to others has not surrounded us yet."""

LINKS_PER_GROUP_MAX = 2
"""Links that we dialled into one network group: addresses in one network are cheap, those in many are not."""

YIELD_INTERVAL_S = 5.0
"""How often a full node lets in a newcomer, for which another peer has to go."""

SEND_QUEUE_BYTES_MAX = 8 * 1024 * 1024
"""Unsent bytes of one link. A peer slower than this misses pushes; anti-entropy brings them later."""

# --- gossip --------------------------------------------------------------------------------------------
PUSH_FANOUT = 4
ANTI_ENTROPY_INTERVAL_S = 10.0

RANGE_FANOUT_BITS = 4
RANGE_FANOUT = 1 << RANGE_FANOUT_BITS
RANGE_LEVEL_MAX = -(-ROUND_MAX.bit_length() // RANGE_FANOUT_BITS) - 1
"""Ledger digests form a tree: 16 rounds to a node, 16 nodes to a parent."""

COMPARED_PARENTS_MAX = 48
"""Differing ranges followed down in one exchange; the next one finds the rest."""

OFFER_DELAY_S = 0.05
"""Payloads that become complete within this time are offered in one message; each hop waits for it."""

LINKS_STATED_MAX = 12
LINK_PREFIX_BYTES = 4
"""A record names the links that its node dialled by the beginnings of the peers' ids: for displays, and to
know which member can vouch for which. Among 1,024 members two begin alike once in 8,000 swarms."""

PART_DELAY_S = 0.004
"""A chunk of a payload that is not complete yet is offered after this time, together with others."""

PART_FANOUT = 6
"""Links that are offered such a chunk: all links at once would wait in one line and not turn to others."""

DEAL_PATIENCE_S = 2.0
"""A payload that was dealt out is offered whole once none of it is known to have spread for this long."""

# --- membership ----------------------------------------------------------------------------------------
HEARTBEAT_INTERVAL_S = 4.5
HEARTBEAT_PER_MEMBER_S = 0.07
"""A member's record is renewed after as many times this as there are members, where that is longer: a node
hears 14 records a second in any swarm of more than 64 (see `Roster.interval_s`)."""

MEMBERS_INTERVAL_S = 1.5
"""New records of all members are gathered for this long and sent in one message."""

ROSTERS_PER_LINK_MAX = 4
"""Roster summaries answered per link in ANTI_ENTROPY_INTERVAL_S: each may draw the records of all members."""

TWIN_PATIENCE_S = 3.0
"""For this long after its first link a node publishes nothing: another process that has its key has heard of
it by then, wherever it is linked, and its answer is here. News of a process that has just begun take a few
round trips, and 1.5 s more from hop to hop where nobody knew of the first one yet."""

MEMBERS_FANOUT = 2
MEMBERS_REPEATS = 2
"""A record goes to 2 links at each of 2 intervals, except those that have it."""

MEMBERS_TURN_INTERVALS = 6
"""A node with many links sends to more of them at a time: none waits longer than this for its turn."""

PROBE_INTERVAL_S = 1.5
"""How often a node looks which links are silent, and which members' silence has lasted."""

PROBE_AFTER_S = 6.5
"""A link on which nothing has come for this long is pinged. Records come more often, so most never are."""

PROBE_TIMEOUT_S = 2.0
INDIRECT_PROBES = 3
VOUCHES_PER_LINK_MAX = 8
"""Pings that we make for one peer within PROBE_TIMEOUT_S: one that wants more would flood others."""

MEMBERS_LAG_S = 5.0
"""A record may be on its way this long, from node to node: a dead node may seem alive for as long."""

IDLE_MIN_S = 15.0
IDLE_STRIDES = 3
STRIDE_MAX_S = 200.0
"""A member is idle if its records state nothing new for IDLE_STRIDES times as long as the last move took."""

RUMOUR_PAUSE_S = 10.0
"""For this long after a suspicion was cleared up, others' suspicions are not believed: a liar could keep the
whole swarm busy with them. What we see ourselves counts."""

SUSPICION_TIMEOUT_S = 6.0
SILENCE_SUSPECT_S = 11.5
"""A member without a link to us is suspected when its gossiped heartbeat stands still this long."""

LINK_SILENCE_S = 20.0
"""A link on which nothing comes for this long is given up and dialled again; heartbeats keep it busier. A
machine that stood still for longer has slept."""

LOCAL_HEALTH_MAX = 8
"""Lifeguard (arXiv 1707.00788): a node that is itself slow multiplies its patience by up to this."""

FORGET_DOWN_AFTER_S = 24 * 3600.0
REDIAL_DOWN_INTERVAL_S = 30.0
REDIAL_INTERVAL_S = 4.5
DIALS_AT_ONCE_MAX = 4
DIALS_TO_GONE_MAX = 2
"""Of these, dials to members that did not answer: an address that swallows packets takes ten seconds."""

# --- history ------------------------------------------------------------------------------------------
CLAIMS_MAX = 4
"""Snapshots that a node holds and claims: those being downloaded must outlive the next ones."""

UNUSABLE_MAX = MEMBERS_MAX
"""Roots of claimed snapshots that turned out unusable, remembered so that none is fetched twice: 32 KiB. A
liar that makes up more has the oldest of them looked at again, which costs an index."""

QUORUM_MAX = 3
"""How many members' claims must agree for others to rely on them; see `quorum` for small swarms."""

SEAL_SETTLE_S = 5.0
"""However fast rounds follow each other, payloads get this long to arrive before their round is sealed."""

FORK_PATIENCE_S = 30.0
"""A difference between claims that lasts this long lies in closed history. A shorter one need not: where a
network has just split into a ring, say, a record takes 20 s to get around, since dead links have to be
noticed first, and then its round is sealed again."""

FORK_DOUBLINGS_MAX = 5
"""A node that has given its history up waits twice as long the next time, up to 16 minutes: one key can sign
a second record for a round that some have closed and others have not, and each such difference costs a
download."""

FORK_MEMORY_S = 3600.0
"""Each such time is remembered for this long: honest partitions are seldom more frequent."""

FORK_MINORITY_PATIENCE_S = 600.0
"""A difference between claims gets this long to go away if missing payloads of at most a third of the authors
may explain it. It gets no longer, since a few authors could hand theirs out chunk by chunk for ever. A node
that gives up its own history closes it, and what others have not got of it by then is lost: so this is far
longer than joiners wait."""

ROSTER_PATIENCE_S = 2.0
"""A joiner listens this long before it decides how many members there are."""

NAMED_PATIENCE_S = 30.0
"""A joiner waits this long for nodes at its join addresses to claim what others do; they may be behind."""

CLOCK_PATIENCE_S = 600.0
"""A joiner waits this long for its clock to be set if, by that clock, most others are at rounds that no swarm
can have reached yet."""

RESUME_PATIENCE_S = 15.0
"""A resumed node looks this long for a peer to compare notes with before it goes on alone."""

WAKE_PATIENCE_S = 60.0
"""A node that slept waits this long for its network to come back; once it has a link, it listens to the
others for RESUME_PATIENCE_S."""

# --- fetching ------------------------------------------------------------------------------------------
FETCHES_MAX = 16
FETCHES_PER_LINK_MAX = 4
PARTS_PER_LINK_MAX = 2
"""A peer that has only parts of a payload is asked for fewer at a time: it is busy getting the rest, and soon
others have them too. Without this a payload takes a fifth longer to reach 8 nodes (`benchmarks spread`)."""

FETCH_WINDOW_BYTES_AT_FIRST = 6 * CHUNK_BYTES_MAX
FETCH_WINDOW_BYTES_MIN = 64 * 1024
FETCH_WINDOW_BYTES_MAX = FETCHES_MAX * CHUNK_BYTES_MAX
"""Another chunk is asked for while fewer bytes than the window are under way (see `requests`). At first that
is one chunk of the largest size from each of LINKS_WANTED links; it is more once our line has shown that it
brings more in time, and one chunk at a time where the line is slow."""

FETCH_SHARE_GOOD = 1 / 2
"""A chunk that took less than this share of its patience came in good time; so would one more beside it."""

GUESSES_MAX = 8
"""Chunks that are asked of links that have not said to hold them, at a time, beside FETCHES_MAX others: on a
line that is never idle they would not get their turn otherwise."""

WANTS_LOOKED_AT_MAX = 512
"""Payloads that are looked at, with every message, for one whose holder is not busy. So a peer that claims to
hold thousands, and sends none, costs others no time."""

PAYLOADS_PER_CHUNK_MAX = 8
"""Payloads as part of which a chunk is offered: as a rule few payloads list the same chunk,
but a liar may list it in thousands."""

FETCH_TIMEOUT_S = 60.0
"""A megabyte within a minute: the slowest holder worth waiting for sends about 140 kbit/s, or twice that
where two nodes ask it."""

FETCH_PATIENCE_S = 12.0
"""The part of it that does not depend on the size: a lost request delays a small chunk by no more."""

FETCH_OVERDUE_S = 3.0
FETCH_OVERDUE_TIMES = 4.0
FETCH_SHARE_AT_FIRST = 1 / 8
"""A transfer that has lasted four times as long as is usual, and at least 3 s, may come to nothing: another
holder is asked too. What is usual is a share of each transfer's patience. Before the first chunk has come, it
is the share on a line of 1 Mbit/s, where a megabyte takes 8 s of 60 s."""

FETCHES_TWICE_MAX = 4
"""Chunks under way from two holders at a time; only one while nothing has come from anybody, since it may be
our own line that is slow."""

SLOW_S = 30.0
"""A link that kept us waiting like this is not asked for what others hold for this long."""

FETCH_SOON_S = 0.1
FETCH_RETRY_S = 1.0
FETCH_REST_MAX_S = 60.0
FETCH_TURN_MIN_S = 0.05
"""A peer that failed a chunk, perhaps because it is busy, is asked for it again after FETCH_SOON_S, then
after twice as long each time, up to FETCH_REST_MAX_S, or at once when it says for the first time that it
holds the chunk. From a wait of FETCH_RETRY_S on we no longer believe that it does. What may be asked for
again within FETCH_TURN_MIN_S is asked for together: chunks may be many and small, and each has a time of its
own."""

PAYLOAD_PATIENCE_S = 30.0
"""Payloads keep a node from training for this long and no longer: if nobody is known to hold them, since
their author may have died before anyone had them; if nothing of them has come for so long, in which the
slowest holder worth waiting for sends 384 KiB; and once all that half of the authors had published is here,
since a few authors could hand theirs out chunk by chunk for ever. A payload that is merged late after all
costs staleness and nothing else."""

UPLOADS_MAX = 16
UPLOADS_PER_MEMBER_MAX = UPLOADS_MAX // 2
UPLOAD_SLOT_S = 1.0
"""Chunks under way from us to all links together, and to one member; requests beyond these are declined. An
upload that takes longer than UPLOAD_SLOT_S no longer counts."""

RATION_COPIES = 4.0
"""How many times over a member may take what we hold, and what comes later: an honest one takes it once, and
all of it again when it loses its disk."""

RATION_PERIOD_S = 24 * 3600.0
"""As many copies are granted again in this time, even where nothing new comes."""

RATION_BYTES_MIN = 64 * 1024 * 1024
"""What we hold counts as at least this much: a node with little to give need not count."""

TURN_PATIENCE_S = 2.0
"""A requested chunk waits this long for its turn on a line that others fill, then it is declined. Less than
FETCH_OVERDUE_S, lest a full line pass for a slow one."""

ASKS_PER_LINK_MAX = 64
"""Chunks that a peer may have asked us to send and not yet received."""

PUTS_PER_LINK_MAX = 2
"""How many of these are under way at a time: one is sent while the answer to the one before is on its way."""

# --- pace ----------------------------------------------------------------------------------------------
ROUND_SLACK = 64
"""How many rounds beyond what the manifest's minimum round length allows are still plausible."""

APART_MAX = 4096
"""Where all rounds are retained, one side of a partition may get this many ahead of the other, and the other
takes what it did at once when it heals. It bounds what one key can have everybody store."""

CLOCK_CACHED_ABOVE_MEMBERS = 64
CLOCK_KEPT_PER_MEMBER_S = 0.001
"""With more members than this, a reading of the clock is kept for a while: one of 1,024 takes 1 ms."""

CLOCK_SKEW_S = 120.0

# --- budgets of a peer (its rates are in `rate_limits`; what goes beyond is read more slowly) -----------
SMALL_CHUNK_BYTES = 16 * 1024
"""A request for a smaller chunk counts as a miss: it costs us 0.8 ms, and the peer little of its ration."""

DECLINED_MISSES = 0.5
"""A declined request counts as this much of a miss: an honest peer asks for other chunks at once."""

PAUSE_MAX_S = 5.0
"""The longest that a link is left unread at a time; well within LINK_SILENCE_S."""

PEERS_WATCHED_MAX = 4_096
"""Node ids, and addresses, whose budgets and points are remembered."""

# --- greylisting ---------------------------------------------------------------------------------------
GREYLIST_HALF_LIFE_S = 300.0
GREYLIST_POINTS = 100.0
"""Three malformed messages or five bad signatures within minutes; see `Offence`."""

GREYLIST_POINTS_RELEASED = 50.0
GREYLIST_POINTS_MAX = 400.0
"""No peer is turned away for longer than 15 minutes after its last offence."""

# --- connections ------------------------------------------------------------------------------------------
CONNECTIONS_MAX = 768
"""Open at once: 64 links with six connections each for chunks are 448; files are usually limited to 1,024."""

STRANGERS_MAX = 256
"""Connections that have proven nothing yet. When there are too many, the oldest gives way."""

STRANGERS_PER_ADDRESS_MAX = 128
CONNECTIONS_PER_LINK_MAX = 8
"""HTTP connections with the session of one link; an honest peer needs FETCHES_PER_LINK_MAX and a few."""

TLS_HANDSHAKE_TIMEOUT_S = 5.0
STRANGER_TIMEOUT_S = 60.0
"""How long a stranger's connection lasts in all: enough for a manifest of 4 MiB at 560 kbit/s."""

STRANGER_BYTES_MAX = CHUNK_BYTES_MAX + 64 * 1024
"""What a stranger may send: requests, a hello, and a chunk behind a header whose session is not read yet."""
