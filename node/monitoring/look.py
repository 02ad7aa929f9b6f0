"""What the vitals judge: one look at the node, taken every second."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The node at one moment."""

    now: float
    """Seconds of the local monotonic clock."""
    late_s: float = 0.0
    """How much later than planned we look: the event loop was busy for this long."""
    links: int = 0
    dialled_by_others: int = 0
    """How often other nodes have linked to us since we started."""
    addresses: tuple[str, ...] = ()
    """Where we say that we can be dialled."""
    lost_address: str = ""
    """The address that we listen on and dial from, if this machine no longer has it."""
    live: int = 0
    """Other members believed to be up."""
    known: int = 0
    """Addresses that lead, or once led, to others."""
    behind: int = 0
    """Rounds that wait to be merged."""
    came: int = 0
    """Bytes of payloads and snapshots that have come from others."""
    missing: int = 0
    """Payloads and snapshots that are wanted and not complete here."""
    others_hold: bool = False
    """Whether a linked node says that it holds some of these."""
    has_model: bool = True
    """Whether the node has the swarm's model."""
    is_ready: bool = True
    """Whether it has all that it begins with: that model, and what has been published since."""
    trains: bool = True
    runs_out: str = ""
    """A warning about this node's invitation, if it ends within days."""
    refused: str = ""
    """Why members no longer let this node in, by the credentials that it knows."""
    version: int = 0
    """Counts merges."""
    diverged: str = ""
    """What is out of range in the model, if anything is."""
    disk_free: int | None = None
    """Bytes; None if not known."""
    files_free: int | None = None
    """How many more files fit on the disk; None if not known, or unbounded."""
    folder_gone: str = ""
    """The node's folder, if it is not where it was."""
    folder_read_only: str = ""
    """The node's folder or one in it, if this user cannot write to it."""
    file_lost: str = ""
    """A file that the node needs at its next start, if it is no longer there."""
    unstored: str = ""
    """Why something cannot be stored, as the log says, if anything cannot."""
    offsets: tuple[float | None, ...] = ()
    """How many seconds the clocks of peers are ahead of ours."""
    contradicted: bool = False
    """Whether most others are at rounds that are not possible yet by our clock."""
    lacks_trainer: bool = False
    overdue_s: float = 0.0
    """How much later than usual the trainer's next step is, if it has one to do."""
    starts: int = 0
    """How many trainers have come since the daemon started."""
    void: int = 0
    """In how many rounds of this run our own deltas are void."""
    outdone: int = 0
    """How often a row of this node came that was newer than our own."""
