"""The running node: its two processes, the daemon and the trainer, and what both need.

It carries out what `gossamer.protocol` decides, and decides nothing about validity itself. Importing this
package imports neither torch nor aiohttp: the daemon and the trainer each pay for what they use.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.node.trainer.peer import Peer as Peer

__all__ = ["Peer"]
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    if name == "Peer":
        if sys.platform == "win32":
            raise ImportError("Gossamer does not run on Windows: install it inside WSL 2")
        from gossamer.node.trainer.peer import Peer

        return Peer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
