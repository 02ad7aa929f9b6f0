"""Every bound of the protocol, by name, with its reason.

Nothing that arrives from the network may grow without one of these. Sizes are bytes, times are seconds.

What decides which bytes are valid binds all nodes: the sections *records* and *manifest*, and the sizes of
credentials and messages. To change one of those is to make another wire protocol. The rest is a node's own
patience and appetite, and may differ from node to node.
"""

# --- records ---------------------------------------------------------------------------------------
RECORD_BYTES_MAX = 64 * 1024
"""One signed envelope. A delta over 1 GiB of payload lists 1,024 chunk hashes: 32 KiB."""

CHUNK_BYTES_MAX = 1024 * 1024
"""Blobs are cut and hashed in pieces of this size: one hash check bounds what a liar can make us hold."""

PAYLOAD_CHUNK_BYTES_MIN = 256 * 1024
"""A payload is cut into smaller chunks than a snapshot, but not so small that requests for them weigh: heads
are some 430 bytes, 0.4 % of what this is at int4 as it travels."""

PAYLOAD_CHUNKS_AIM = 64
"""Until chunks are CHUNK_BYTES_MAX long, a payload has no more of them than this: 2 KiB of its record."""

PAYLOAD_CHUNKS_MAX = 1024
"""Chunks of one delta (1 GiB): one fragment of a 2 G parameter model at int4."""

INDEX_CHUNKS_MAX = CHUNK_BYTES_MAX // 32
"""Chunks of a snapshot: its list of hashes is itself one chunk. 32 GiB, 8 G parameters."""

COUNTER_MAX = 2**53
"""Of whatever only counts: heartbeats, steps, pings. A double still holds it exactly."""

UNIX_S_MAX = 2**40

ROUND_MAX = 2**31 - 1
TOKENS_MAX = 2**40
"""Tokens of one window. A thousand GPUs at a million tokens a second for 10 minutes is 2**39."""

TOKENS_TOTAL_MAX = 2**63 - 1
"""Tokens of all deltas together; more counts as this. Liars get there in 2**23 records."""

STEPS_MAX = 2**24
STALENESS_MAX = 2**20
LOSS_MAX = 1e6
TOKENS_PER_S_MAX = 1e15

# --- manifest ----------------------------------------------------------------------------------------
MANIFEST_BYTES_MAX = 4 * 1024 * 1024
TENSORS_MAX = 20_000
TENSOR_DIMS_MAX = 8
FRAGMENTS_MAX = 256
PARAMETERS_MAX = INDEX_CHUNKS_MAX * CHUNK_BYTES_MAX // 4
TEXT_BYTES_MAX = 256
"""Names, devices, versions, reasons: anything a person will read in one line."""

# --- admission ------------------------------------------------------------------------------------------
OWNERS_MAX = 16
CREDENTIAL_BYTES_MAX = 1024
"""A grant or a revocation in its envelope; the reason is the longest thing in it."""

REASON_BYTES_MAX = 160
"""Of a revocation: with what a door says around it, it still is one text of TEXT_BYTES_MAX."""

CHARTER_NODES_MAX = 4096
"""Node ids that grants and revocations may speak of. Only owners can fill this."""

CHARTER_MAX = 3 * CHARTER_NODES_MAX
"""Of each node id at most one grant a role and one revocation are in force."""

EXPIRY_LOOK_S = 4.0
"""At every third of the turns that a node takes (see `replica`): a member's link is cut within 5 s of the end
of its invitation."""

ASK_FRESH_S = 300.0
"""A signed question is answered this long: clocks of people's machines differ by minutes."""

# --- links and messages --------------------------------------------------------------------------------
MESSAGE_BYTES_MAX = 2 * 1024 * 1024 + 64 * 1024
"""One WebSocket message: RECORDS_PER_MESSAGE_MAX records of the largest size, and their framing."""

ARRAYS_MAX = 4096
"""Arrays in one msgpack value, nested ones included; the largest Inventory has under half as many. An empty
array is one byte on the wire and 64 in memory: unbounded, a message could take 130 MiB and half a second."""

RECORDS_PER_MESSAGE_MAX = 32
"""Signatures are checked on the event loop, about 0.1 ms each: 32 keep a message under 4 ms."""

IDS_PER_MESSAGE_MAX = 1024
IDS_PER_ROUND_MAX = 2048
"""Record ids of one round in an Inventory: two, the proof of equivocation, from each of MEMBERS_MAX."""

ADDRESSES_PER_PEER_MAX = 8
MEMBERS_MAX = 1024
"""Rows a node keeps. Full knowledge is meant for up to 256 members; beyond it, down members go first."""

AUTHORS_KEPT = 4 * MEMBERS_MAX
"""Authors whose last round we remember: more only while they are members, or their rounds are open."""

LINKS_MAX = 64
"""A node wants few links, but takes in many: it may be the only one that others can reach."""

LINKS_WANTED = 6
LINKS_MIN = 4
LINKS_OUTBOUND_MIN = 2
"""Links that we chose ourselves: who fills all places that others can take has not surrounded us yet."""

LINKS_PER_GROUP_MAX = 2
"""Links that we dialled into one network group: addresses of one network are cheap, of many they are not."""

LINKS_LOOK_INTERVAL_S = 1.5
"""How often a node looks whether it has links enough: it wakes once for this and for its rows."""

YIELD_INTERVAL_S = 5.0
"""How often a full node lets a newcomer in for whom another has to go."""

SEND_QUEUE_BYTES_MAX = 8 * 1024 * 1024
"""Unsent bytes of one link. A peer slower than this misses pushes; anti-entropy brings them later."""

# --- gossip --------------------------------------------------------------------------------------------
PUSH_FANOUT = 4
RELAY_DELAY_S = 1.0
"""So long a record waits for its payload, if that is one chunk and the sender of the record has it: the two
then spread in one message, and no later than a promise and its keeping would bring the payload."""

ANTI_ENTROPY_INTERVAL_S = 10.0
EXCHANGES_APART_S = 2.0
"""A link's end makes the next exchange due, this long after the last one."""
RANGE_FANOUT_BITS = 4
"""Ledger digests form a tree of 16 rounds a node, 16 nodes a parent."""

COMPARED_PARENTS_MAX = 48
"""Differing ranges followed down in one exchange; what remains is found by the next."""

OFFER_DELAY_S = 0.05
"""What became complete within this time is offered in one message, and not to links that offer it to us
meanwhile. A payload that goes by way of others waits this long at each."""

LINKS_TOLD_MAX = 12
LINK_PREFIX_BYTES = 4
"""Of the links that a node dialled its row names so many, by so much of the other's id, for displays and to
know who can tell of whom: 20 bytes with 5 of them, every 4.5 s. Of 1,024 members two begin alike once in
8,000 swarms."""

PART_DELAY_S = 0.004
"""A chunk of a payload that is not complete yet is offered after this time, together with others: it has less
far to go than a payload, and all who wait for it wait for this at each that it goes through."""

PART_FANOUT = 6
"""Links that are offered a chunk of a payload that is not complete: a node with many links would be asked for
it by all of them at once, and those that wait in its line would not turn to others."""

DEAL_PATIENCE_S = 2.0
"""A payload that was dealt out is offered to all whole when none of it was heard to spread for this long."""

# --- membership ----------------------------------------------------------------------------------------
HEARTBEAT_INTERVAL_S = 4.5
ROWS_INTERVAL_S = 1.5
"""New rows of everybody are gathered this long and told in one message."""

ROSTERS_PER_LINK_MAX = 4
"""Answered in ANTI_ENTROPY_INTERVAL_S: an honest peer sends one when it links to us, one of its own accord,
and the answer to ours. Each may draw the rows of all members."""

ROWS_LINKS = 2
ROWS_TELLINGS = 2
"""A row goes to 2 links at each of 2 intervals, less those that have it: the next one comes after 4.5 s."""

ROWS_TURN_INTERVALS = 6
"""Many links are told more at a time, so that none waits longer than this for its turn."""

PROBE_INTERVAL_S = 1.5
"""How often a node looks which links are silent, and whose silence has lasted."""

PROBE_AFTER_S = 6.5
"""A link on which nothing has come for this long is pinged. Rows come more often, so most never are."""

PROBE_TIMEOUT_S = 2.0
INDIRECT_PROBES = 3
INDIRECT_PROBE_TIMEOUT_S = 2.0
VOUCHES_PER_LINK_MAX = 8
"""Pings in that time that we make for one peer. Each silent node is asked after at three links: who asks one
of them about more has lost its own network, or wants others flooded with our pings."""

ROW_LAG_S = 5.0
"""So long a row may be on its way, from one to the next: so long after a death its node may seem alive."""

IDLE_MIN_S = 15.0
IDLE_STRIDES = 3
STRIDE_MAX_S = 200.0
"""Whose rows tell of no inner step for so many times what the last one took is taken for idle: not before
three heartbeats, and after ten minutes at the latest."""

RECOVERY_TRUST_S = 30.0
"""Whom a row cleared of a suspicion, others are asked about: but not twice within this time, in which silence
is sign enough."""

RUMOUR_PAUSE_S = 10.0
"""So long after a suspicion of somebody has been cleared up others' are not believed: who makes them up could
have all talk of it all the time. What we see ourselves counts."""

SUSPICION_TIMEOUT_S = 6.0
SILENCE_SUSPECT_S = 11.5
"""A member without a link to us is suspected when its gossiped heartbeat stands still this long."""

LINK_SILENCE_S = 20.0
"""A link on which nothing comes for this long is given up and dialled anew; heartbeats keep it busier."""

LOCAL_HEALTH_MAX = 8
"""Lifeguard (arXiv 1707.00788): a node that is itself slow multiplies its patience by up to this."""

FORGET_DOWN_AFTER_S = 24 * 3600.0
REDIAL_DOWN_INTERVAL_S = 30.0
REDIAL_INTERVAL_S = 4.5
DIALS_AT_ONCE_MAX = 4
DIALS_TO_GONE_MAX = 2
"""Dials at once to members that did not answer: where an address swallows packets one takes ten seconds."""

# --- history ------------------------------------------------------------------------------------------
CLAIMS_MAX = 4
"""Snapshots that a node holds and tells of: those being downloaded must outlive the next ones."""

UNUSABLE_MAX = MEMBERS_MAX
"""Claimed snapshots that cannot be, remembered so that none is fetched twice: 32 KiB. A liar that makes up
more has the oldest of them looked at again, which costs an index."""

SEAL_SETTLE_S = 5.0
"""However fast rounds follow each other, payloads get this long to arrive before their round is sealed."""

LINEAGE_PATIENCE_S = 30.0
"""A difference of claims that lasts is one of closed history. But where a network has just split into a ring,
say, a record needs 20 s to get around: dead links have to be noticed first. Then its round is sealed anew."""

LINEAGE_DOUBLINGS_MAX = 5
"""A node that has given its history up waits twice as long the next time, up to 16 minutes: one key can sign
a second record for a round that some have closed and others have not, and each such difference costs a
download."""

LINEAGE_MEMORY_S = 3600.0
"""So long each time is remembered: honest partitions are seldom more frequent."""

LINEAGE_MINORITY_PATIENCE_S = 600.0
"""A difference of claims that missing payloads of a third of the authors may explain gets so long to go away,
since a few could hand theirs out chunk by chunk for ever. A node that gives its own up closes it, and what
others had not got of it by then is lost: so this is far longer than joiners wait."""

ROSTER_PATIENCE_S = 2.0
"""A joiner hears this long of members before it decides how many of them there are."""

PREFETCH_AFTER_S = 0.05
"""Meanwhile it begins to fetch what most of those claim of whom it heard so soon: the first node that it is
linked to tells of all others at once."""

NAMED_PATIENCE_S = 30.0
"""A joiner waits this long for those at its join addresses to claim what others do; they may be behind."""

CLOCK_PATIENCE_S = 600.0
"""A joiner waits this long for its clock to be set, if by that most others are where no swarm can be yet."""

RESUME_PATIENCE_S = 15.0
"""A resumed node looks this long for a peer to compare notes with before it goes on alone."""

WAKE_PATIENCE_S = 60.0
"""One that slept has its network back by then, and hears of the others for RESUME_PATIENCE_S once it has."""

OUTLIVED_PATIENCE_S = 600.0
"""A node that begins anew waits so long for those that went on, if they are gone, and then does without."""

SLEEP_MIN_S = 20.0
"""A machine that stood still for longer has slept: others have given up its links (LINK_SILENCE_S). A slow
event loop is late by seconds."""

# --- fetching ------------------------------------------------------------------------------------------
FETCHES_MAX = 16
FETCHES_PER_LINK_MAX = 4
PARTS_PER_LINK_MAX = 2
"""A peer that has only parts of a payload is asked for fewer at a time: it is busy getting the rest, and soon
others have them too."""

FETCH_WINDOW_BYTES_AT_FIRST = 6 * CHUNK_BYTES_MAX
FETCH_WINDOW_BYTES_MIN = 64 * 1024
FETCH_WINDOW_BYTES_MAX = FETCHES_MAX * CHUNK_BYTES_MAX
"""While less is under way another chunk is asked for, see `window`: one of the largest from each of as
many links as are wanted until our line has shown that it brings more in time, and one where it is slow."""

FETCH_SHARE_GOOD = 1 / 2
"""A chunk that took less of the patience with it came in good time: one more beside it would have, too."""

GUESSES_KEPT = 2
"""Of FETCHES_MAX, for payloads that nobody is known to hold, however many there are that somebody holds: on a
line that is never idle they would not get their turn."""

WANTS_LOOKED_AT_MAX = 512
"""Payloads whose holders may be busy that are looked at for one to begin with: with every message, so that a
peer that claims to hold thousands, and sends none, costs others no time."""

SHARED_BY_MAX = 8
"""Payloads as whose part a chunk is offered, or a second holder asked for it: few list the same one as a
rule, and a liar does in thousands."""

FETCH_TIMEOUT_S = 60.0
"""A megabyte within a minute: about 140 kbit/s from the slowest holder worth waiting for, or twice that where
two ask it."""

FETCH_PATIENCE_S = 12.0
"""The part of it that does not depend on the size: a request that was lost costs a small chunk no more."""

FETCH_OVERDUE_S = 3.0
FETCH_OVERDUE_TIMES = 4.0
FETCH_SHARE_AT_FIRST = 1 / 8
"""A transfer that lasts four times as long as others usually do, and 3 s at least, may be one that nothing
comes of: another holder is asked too. Usual is a share of the patience with each; before the first has come
that of lines of 1 Mbit/s, at which a megabyte takes 8 s of 60 s."""

FETCHES_TWICE_MAX = 4
"""Chunks under way from two holders at a time: one of them while nothing has come from anybody, since it may
be our own line that is slow."""

TARDY_REST_S = 8.0
TARDY_REST_MAX_S = 300.0
"""A link that kept us waiting so is not asked for what others hold so long, then twice as long each time."""

FETCH_SOON_S = 0.1
FETCH_RETRY_S = 1.0
FETCH_RETRY_MAX_S = 8.0
"""A peer that failed a chunk, perhaps since it is busy, is asked for it again soon, then after twice that, up
to this, unless it says that it holds it. A wait of FETCH_RETRY_S or more means that we no longer believe it:
a payload that nobody has costs little while it is looked for."""

ORPHAN_PATIENCE_S = 30.0
"""A payload that nobody is known to hold keeps a node from training this long and no longer: its author
may have died before anyone had it."""

ORPHAN_RETRY_MAX_S = 60.0
"""Of a payload of which nothing was found for ORPHAN_PATIENCE_S each peer is asked no more often than this:
whoever finds it after all tells everybody."""

STALL_PATIENCE_S = 30.0
"""Payloads that somebody says it holds keep a node from training until nothing of them has come for so long.
The slowest holder worth waiting for brings 384 KiB in it. What is merged late after all costs staleness, and
nothing else."""

MINORITY_PATIENCE_S = 30.0
"""Once all that half the authors had published is here, the others' payloads keep a node from training this
long and no longer: a few could hand theirs out chunk by chunk for ever."""

UPLOADS_MAX = 16
UPLOADS_PER_MEMBER_MAX = UPLOADS_MAX // 2
UPLOAD_COUNTS_S = 1.0
"""Chunks under way from us to all links together, and to one member, which asks for FETCHES_PER_LINK_MAX at a
time; what is asked for beyond them is declined. Two MiB, as payloads of 10 M parameters are cut: a fifth of a
second of 100 Mbit/s. What takes longer counts no more."""

RATION_COPIES = 4.0
"""How many times over a member may take what we hold, and what comes anew: an honest one takes it once, parts
of it again where its line breaks, and all of it when it loses its disk."""

RATION_PERIOD_S = 24 * 3600.0
"""As many copies are granted again in this time where nothing comes any more."""

RATION_BYTES_MIN = 64 * 1024 * 1024
"""Of what we hold, at least this is counted: a node with little to give need not count."""

TURN_PATIENCE_S = 2.0
"""So long a chunk that was asked for waits for its turn on a line that others fill, before it is declined,
not counting those before it on its link: less than FETCH_OVERDUE_S, lest a full line pass for a slow one."""

ASKS_PER_LINK_MAX = 64
"""Chunks a peer may have asked us to send and not yet received."""

PUTS_PER_LINK_MAX = 2
"""Of the chunks asked, under way at a time: one is sent while the answer to the one before is on its way."""

# --- pace ----------------------------------------------------------------------------------------------
ROUND_SLACK = 64
"""Rounds a clock may be ahead of the manifest's minimum round length before it is implausible."""

CLOCK_READ_ANEW_MEMBERS = 64
CLOCK_KEPT_PER_MEMBER_S = 0.00025
"""Of more members than that the round clock is not read anew with every event: a reading is kept for so long
for each of them. One of 1,024 members takes 0.3 ms, and is kept for a quarter of a second."""

CLOCK_SKEW_S = 120.0

# --- budgets of a peer (see budget; what goes beyond is read more slowly) --------------------------------
MESSAGES_PER_S = 500.0
"""A member that relays every row and record of 1,024 members to 6 links sends some 250 a second."""

MESSAGES_BURST = 10_000.0
"""A joiner's 100,000 records come in 3,125 messages."""

MESSAGE_BYTES_PER_S = 16.0 * 1024 * 1024
MESSAGE_BYTES_BURST = 512.0 * 1024 * 1024
"""A joiner's 10,000 records at 32 KiB each, the largest that honest nodes sign, are 320 MiB."""

CPU_PER_NODE = 0.08
"""Processor seconds a second. Rows of 1,024 members, relayed by one, take 0.06; a small swarm's 0.003."""

CPU_PER_NODE_BURST_S = 3.0
CPU_PER_ADDRESS = 0.25
"""Keys cost nothing: a budget of each key alone would bind nobody. Honest nodes may share an address."""

CPU_PER_ADDRESS_BURST_S = 10.0

RECORDS_PER_S = 200.0
"""New ones, at 0.25 ms each for signature, parsing and storing: a twentieth of a processor. 1,024 members
publish a record each 5 s at the most."""

RECORDS_BURST = 20_000.0
"""A joiner is sent all that is not closed yet: by one link alone 1,040 rounds of 19 members, in a swarm as
`gossamer init` begins it."""

MESSAGE_OVERHEAD_S = 60e-6
BYTE_OVERHEAD_S = 2e-9
"""What a message costs besides its handling, where nobody measures: frames, TLS, system calls, an answer."""

RECORD_CREDIT_S = 0.0005
"""CPU time that a record new to us has bought its sender: what a joiner asked for costs a peer nothing."""

MISSES_PER_S = 100.0
MISSES_BURST = 4_096.0
"""A peer that does not know who holds a payload asks everybody: 1,024 chunks, a few times over."""

SMALL_CHUNK_BYTES = 16 * 1024
"""One that is smaller counts as a miss: it costs us the request, 0.8 ms of processor, and little of a ration.
1,024 members publish 205 payloads a second, which come over six links or so."""

DECLINED_MISSES = 0.5
"""What a request counts that we decline: a peer that finds us busy asks for others at once, and again
soon."""

REQUESTS_PER_S = 20.0
REQUESTS_BURST = 400.0
"""Manifest and status, asked from one address; 64 joiners on one machine ask at once."""

CONNECTIONS_PER_S = 30.0
"""From one address: a TLS handshake takes 2 to 3 ms of processor."""

CONNECTIONS_BURST = 1_000.0
"""64 nodes behind one router join at once, and open connections for their chunks."""

HANDSHAKES_PER_NODE_S = 0.5
"""One key that links itself anew: more often than REDIAL_INTERVAL_S lets an honest node."""

HANDSHAKES_PER_NODE_BURST = 20.0
PAUSE_MAX_S = 5.0
"""The longest that a link is left unread at a time; well within LINK_SILENCE_S."""

PEERS_WATCHED_MAX = 4_096
"""Node ids, and addresses, whose budgets and points are remembered."""

# --- greylisting ---------------------------------------------------------------------------------------
GREYLIST_HALF_LIFE_S = 300.0
GREYLIST_POINTS = 100.0
"""Three malformed messages or five bad signatures within minutes; see `greylist.Offence`."""

GREYLIST_POINTS_RELEASED = 50.0
GREYLIST_POINTS_MAX = 400.0
"""Nobody is turned away for longer than 15 minutes after it has stopped."""

# --- the door --------------------------------------------------------------------------------------------
CONNECTIONS_MAX = 768
"""Open at once. LINKS_MAX links with six connections each for chunks are 448; below the usual limit of 1,024
open files."""

STRANGERS_MAX = 256
"""Connections that have proven nothing yet. When they are too many, the oldest gives way."""

STRANGERS_PER_ADDRESS_MAX = 128
CONNECTIONS_PER_LINK_MAX = 8
"""HTTP connections with the session of one link; an honest peer needs FETCHES_PER_LINK_MAX and a few."""

TLS_HANDSHAKE_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
"""A whole request, its headers at least, must be here within this time after the one before."""

STRANGER_TIMEOUT_S = 60.0
"""A stranger's connection in all: time for a manifest of 4 MiB at 560 kbit/s."""

STRANGER_BYTES_MAX = CHUNK_BYTES_MAX + 64 * 1024
"""What a stranger may send: requests, a hello, and a chunk behind a header whose session is not yet read."""
