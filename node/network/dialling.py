"""Carries out `Dial`, and tells the core of what did not become a link."""

import logging
from collections.abc import Callable

import aiohttp

from gossamer.node.address import parse_address
from gossamer.node.network.policing import Policing
from gossamer.node.network.transport import Transport
from gossamer.protocol import effects as fx
from gossamer.protocol.errors import ConfigError, PeerError

log = logging.getLogger("gossamer.node")


class Dialler:
    """Dials peers, except those that are turned away."""

    def __init__(
        self, transport: Transport, policing: Policing, dispatch: Callable[[fx.Event], object]
    ) -> None:
        self._transport = transport
        self._policing = policing
        self._dispatch = dispatch

    async def dial(self, effect: fx.Dial) -> None:
        """Dial a peer and carry the link until it ends; the core is told if it never came up."""
        try:
            parse_address(effect.address)  # it may be a peer's word
            if not self._policing.is_greylisted(effect.node_id):
                await self._transport.dial(effect.address, effect.node_id, effect.fingerprint)
                return
        except ConfigError as error:
            log.debug("%s", error)
        except PeerError as error:
            self._policing.complain(f"{effect.address}:", str(error))
        except aiohttp.ServerFingerprintMismatch:
            self._policing.complain(f"{effect.address}:", "shows another certificate than its own row names")
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("cannot reach %s: %s", effect.address, error)
        self._dispatch(fx.DialFailed(effect.address))
