"""Carries out `Dial` effects, and tells the core of dials that failed."""

import logging
from collections.abc import Callable

import aiohttp

from gossamer.node.address import parse_address
from gossamer.node.network.policing import Policing
from gossamer.node.network.transport import Transport
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.core.replica import Replica
from gossamer.protocol.errors import ConfigError, PeerError

log = logging.getLogger("gossamer.node")


class Dialler:
    """Dials peers, except those that are turned away."""

    def __init__(
        self,
        transport: Transport,
        policing: Policing,
        core: Replica,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._transport = transport
        self._policing = policing
        self._core = core
        self._dispatch = dispatch

    async def dial(self, effect: fx.Dial) -> None:
        """Dial a peer and carry the link until it ends. The core is told if it never came up."""
        try:
            parse_address(effect.address)  # a peer may have made it up
            if not self._policing.is_greylisted(effect.node_id):
                await self._transport.dial(effect.address, effect.node_id, effect.fingerprint)
                return
        except ConfigError as error:
            log.debug("%s", error)
        except PeerError as error:
            self._policing.complain(f"{effect.address}:", str(error))
        except aiohttp.ServerFingerprintMismatch as error:
            if self._is_namesake(effect.address, error.got):
                log.debug("%s is also the address of another member, which answers there", effect.address)
            else:
                what = "shows a different certificate than its own row names"
                self._policing.complain(f"{effect.address}:", what)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("cannot reach %s: %s", effect.address, error)
        self._dispatch(ev.DialFailed(effect.address))

    def _is_namesake(self, address: str, fingerprint: bytes) -> bool:
        """Whether the certificate is that of another member that states the same address, or our own.

        Two members in two homes may have the same private address: each is reached by nodes in its own home.
        And the address of a member that listens on loopback leads every other node to itself.
        """
        rows = [member.row.body for member in self._core.roster.members()]
        theirs = any(address in row.addresses and row.fingerprint == fingerprint for row in rows)
        return theirs or fingerprint == self._core.own_row.fingerprint
