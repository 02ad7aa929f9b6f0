"""`gossamer top`: shows a node and its swarm on a full terminal, until a key ends it."""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from gossamer.node.dashboard.admin_client import AdminClient
from gossamer.node.dashboard.board import ROUNDS_SHOWN, Board
from gossamer.node.dashboard.shown import WRONG_SHAPE, harmless_line
from gossamer.node.dashboard.top_view import SORTS, Choices, screen
from gossamer.protocol.errors import ConfigError, UnreachableError

RECONNECT_S = 1.0

_UP = ("\x1b[A", "\x1bOA", "k")
_DOWN = ("\x1b[B", "\x1bOB", "j")
_QUIT = ("q", "Q", "\x03", "\x04")


def keys_in(data: str) -> list[str]:
    """Split a terminal's input into keys: an arrow key is three characters."""
    keys = []
    while data:
        length = 3 if data[0] == "\x1b" and data[1:2] in ("[", "O") else 1
        keys.append(data[:length])
        data = data[length:]
    return keys


class Top:
    """Listens to an admin server and draws."""

    def __init__(self, where: Callable[[], str], console: Console, sleep: Callable[[], None]) -> None:
        """`where` finds the server, and is called again each time that it has gone; it may raise ConfigError.

        `sleep` restores the terminal for as long as this process is stopped (Ctrl-Z).
        """
        self._where = where
        self._console = console
        self._sleep = sleep
        self._board = Board(where())
        self._paused: Board | None = None
        self._choices = Choices()
        self._over = asyncio.Event()
        self._live: Live | None = None

    async def run(self) -> None:
        """Draw until the person quits."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._over.set)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        loop.add_signal_handler(signal.SIGTSTP, self._pause)
        with Live(console=self._console, screen=True, auto_refresh=False) as self._live:
            self._draw()
            listening = asyncio.create_task(self._listen())
            listening.add_done_callback(lambda _: self._over.set())  # it only ends by a fault
            try:
                await self._over.wait()
            finally:
                self._live = None
                listening.cancel()
                with suppress(asyncio.CancelledError):
                    await listening

    def press(self, key: str) -> None:
        """React to a key."""
        choices = self._choices
        if key in _QUIT:
            self._over.set()
            return
        if key == "?" or choices.help:
            choices.help = not choices.help
        elif key == "s":
            choices.sort = (choices.sort + 1) % len(SORTS)
        elif key in _UP:
            choices.step -= 1
        elif key in _DOWN:
            choices.step += 1
        elif key in ("p", " "):
            choices.paused = not choices.paused
            self._paused = self._board.copy() if choices.paused else None
        self._draw()

    def _pause(self) -> None:
        """Ctrl-Z: restore the screen for the shell, until this process goes on."""
        if self._live is not None:
            self._live.stop()
            self._sleep()
            self._live.start()
            self._draw()

    async def _listen(self) -> None:
        """Take in what the server says; look for it again when it has gone."""
        while True:
            try:
                async with AdminClient(self._board.address) as client:
                    await self._hear(client)
            except UnreachableError as error:
                self._board.problem = str(error)
            self._draw()
            await asyncio.sleep(RECONNECT_S)
            with suppress(ConfigError):  # it may have come back elsewhere
                self._board.address = self._where()

    async def _hear(self, client: AdminClient) -> None:
        """Listen until the server goes away, or says what no node would."""
        try:
            await self._follow(client)
            self._board.problem = self._board.problem or "the node closed the connection"
        except WRONG_SHAPE as error:
            self._board.forget(_no_admin_server(self._board.address, error))

    async def _follow(self, client: AdminClient) -> None:
        self._board.notices.clear()
        is_first = True
        async for name, data in client.events():
            self._board.take(name, data)
            if is_first and name == "state":
                is_first = False
                first = max(0, data["now"]["clock"] - ROUNDS_SHOWN)
                async for told in client.rounds(first):
                    self._board.take("rounds", told)
            if name == "state":
                self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        width, height = self._console.size
        board = self._paused or self._board
        try:
            drawn = screen(board, self._choices, width, height)
        except (*WRONG_SHAPE, OSError) as error:
            board.forget(_no_admin_server(board.address, error))
            drawn = screen(board, self._choices, width, height)
        self._live.update(drawn, refresh=True)


def _no_admin_server(address: str, error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"the server at {address} is not an admin server of this Gossamer release ({harmless_line(said)})"


def show_top(where: Callable[[], str]) -> None:
    """Run on this process's terminal. Raises ConfigError if there is none."""
    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        raise ConfigError(
            "gossamer top needs a terminal that it can draw on; in scripts, use gossamer status --json"
        )
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def sleep() -> None:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        os.kill(os.getpid(), signal.SIGSTOP)
        tty.setcbreak(fd)

    try:
        tty.setcbreak(fd)
        asyncio.run(_run(Top(where, console, sleep), fd))
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _run(top: Top, fd: int) -> None:
    def read() -> None:
        data = os.read(fd, 1024)
        for key in keys_in(data.decode("utf-8", "replace")) or ["q"]:  # the terminal is gone
            top.press(key)

    asyncio.get_running_loop().add_reader(fd, read)
    await top.run()
