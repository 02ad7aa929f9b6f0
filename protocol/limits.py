"""Every bound of the protocol, by name, with its reason.

Nothing that arrives from the network may grow without one of these. Sizes are bytes, times are seconds.
"""

# --- records ---------------------------------------------------------------------------------------
RECORD_BYTES_MAX = 64 * 1024
"""One signed envelope. A delta over 1 GiB of payload lists 1,024 chunk hashes: 32 KiB."""

CHUNK_BYTES_MAX = 1024 * 1024
"""Blobs are cut and hashed in pieces of this size: one hash check bounds what a liar can make us hold."""

PAYLOAD_CHUNKS_MAX = 1024
"""Chunks of one delta (1 GiB): one fragment of a 2 G parameter model at int4."""

INDEX_CHUNKS_MAX = CHUNK_BYTES_MAX // 32
"""Chunks of a snapshot: its list of hashes is itself one chunk. 32 GiB, 8 G parameters."""

ROUND_MAX = 2**31 - 1
TOKENS_MAX = 2**40
"""Tokens of one window. A thousand GPUs at a million tokens a second for 10 minutes is 2**39."""

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

# --- links and messages --------------------------------------------------------------------------------
MESSAGE_BYTES_MAX = 2 * 1024 * 1024 + 64 * 1024
"""One WebSocket message: RECORDS_PER_MESSAGE_MAX records of the largest size, and their framing."""

RECORDS_PER_MESSAGE_MAX = 32
"""Signatures are checked on the event loop, about 0.1 ms each: 32 keep a message under 4 ms."""

IDS_PER_MESSAGE_MAX = 1024
IDS_PER_ROUND_MAX = 2048
"""Record ids of one round in an Inventory: two, the proof of equivocation, from each of MEMBERS_MAX."""

ADDRESSES_PER_PEER_MAX = 8
MEMBERS_MAX = 1024
"""Rows a node keeps. Full knowledge is meant for up to 256 members; beyond it, down members go first."""

LINKS_MAX = 64
"""A node wants few links, but takes in many: it may be the only one that others can reach."""

LINKS_WANTED = 6
LINKS_MIN = 4
SEND_QUEUE_BYTES_MAX = 8 * 1024 * 1024
"""Unsent bytes of one link. A peer slower than this misses pushes; anti-entropy brings them later."""

# --- gossip --------------------------------------------------------------------------------------------
PUSH_FANOUT = 4
ANTI_ENTROPY_INTERVAL_S = 10.0
RANGE_FANOUT_BITS = 4
"""Ledger digests form a tree of 16 rounds a node, 16 nodes a parent."""

COMPARED_PARENTS_MAX = 48
"""Differing ranges followed down in one exchange; what remains is found by the next."""

OFFER_DELAY_S = 0.05
"""What became complete within this time is offered in one message, and not to links that offer it to us
meanwhile. A payload that goes by way of others waits this long at each."""

# --- membership ----------------------------------------------------------------------------------------
HEARTBEAT_INTERVAL_S = 3.0
ROWS_INTERVAL_S = 1.0
"""New rows of everybody are gathered this long and told in one message."""

ROWS_LINKS = 2
ROWS_TELLINGS = 2
"""A row goes to 2 links at each of 2 intervals, less those that have it: the next one comes after 3 s."""

ROWS_TURN_INTERVALS = 8
"""Many links are told more at a time, so that none waits longer than this for its turn."""

PROBE_INTERVAL_S = 1.5
PROBE_TIMEOUT_S = 3.0
INDIRECT_PROBES = 3
INDIRECT_PROBE_TIMEOUT_S = 3.0
ROW_LAG_S = 5.0
"""So long a row may be on its way: one that comes within this time of a death is no sign of life."""

SUSPICION_TIMEOUT_S = 6.0
SILENCE_SUSPECT_S = 11.0
"""A member without a link to us is suspected when its gossiped heartbeat stands still this long."""

LINK_SILENCE_S = 20.0
"""A link on which nothing comes for this long is given up and dialled anew; heartbeats keep it busier."""

LOCAL_HEALTH_MAX = 8
"""Lifeguard (arXiv 1707.00788): a node that is itself slow multiplies its patience by up to this."""

FORGET_DOWN_AFTER_S = 24 * 3600.0
REDIAL_DOWN_INTERVAL_S = 30.0
REDIAL_INTERVAL_S = 5.0
DIALS_AT_ONCE_MAX = 4

# --- history ------------------------------------------------------------------------------------------
CLAIMS_MAX = 4
"""Snapshots that a node holds and tells of: those being downloaded must outlive the next ones."""

SEAL_SETTLE_S = 5.0
"""However fast rounds follow each other, payloads get this long to arrive before their round is sealed."""

LINEAGE_PATIENCE_S = 12.0
"""Longer than an anti-entropy period: a difference of claims that lasts is one of closed history."""

ROSTER_PATIENCE_S = 2.0
"""A joiner hears this long of members before it decides how many of them there are."""

RESUME_PATIENCE_S = 15.0
"""A resumed node looks this long for a peer to compare notes with before it goes on alone."""

# --- fetching ------------------------------------------------------------------------------------------
FETCHES_MAX = 16
FETCHES_PER_LINK_MAX = 4
FETCH_TIMEOUT_S = 60.0
"""A megabyte within a minute: about 140 kbit/s, the slowest holder worth waiting for."""

FETCH_PATIENCE_S = 12.0
"""The part of it that does not depend on the size: a request that was lost costs a small chunk no more."""

FETCH_RETRY_S = 1.0
FETCH_RETRY_MAX_S = 8.0
"""A peer that failed a chunk is asked for it again after a moment, then after twice that, up to this, unless
it says that it holds it: a payload that nobody has costs little while it is looked for."""

ORPHAN_PATIENCE_S = 30.0
"""A payload that nobody is known to hold keeps a node from training this long and no longer: its author
may have died before anyone had it."""

ASKS_PER_LINK_MAX = 64
"""Chunks a peer may have asked us to send and not yet received."""

# --- pace ----------------------------------------------------------------------------------------------
ROUND_SLACK = 64
"""Rounds a clock may be ahead of the manifest's minimum round length before it is implausible."""

CLOCK_SKEW_S = 120.0
