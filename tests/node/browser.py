"""A headless Chromium, driven over its DevTools protocol with aiohttp alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60.0


def find_browser() -> str | None:
    """The browser: $GOSSAMER_TEST_BROWSER, or a Chromium on the PATH; None if there is none."""
    named = os.environ.get("GOSSAMER_TEST_BROWSER")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


BROWSER = find_browser()


def in_browser(test: Any) -> Any:
    """Mark a test that needs a browser, and so takes a while."""
    reason = "no Chromium here; GOSSAMER_TEST_BROWSER may name one"
    return pytest.mark.slow(pytest.mark.skipif(BROWSER is None, reason=reason)(test))


class Page:
    """One tab. What it logs, requests and throws is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Uncaught exceptions, and all that the console or the browser reports as a warning or an error."""
        self.requests: list[str] = []

    async def read(self) -> None:
        async for frame in self._socket:
            message = frame.json()
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(
                " ".join(str(a.get("value", a.get("description"))) for a in params["args"])
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        message = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        result = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait for an expression to be true; returns its value."""
        end = time.monotonic() + PATIENCE_S
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < end, f"never came true: {expression}"
            await asyncio.sleep(0.05)
        return value

    async def drawn(self) -> None:
        """Wait until two more frames are on the screen."""
        await self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    async def open(self, url: str, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && 'gossamer' in window")

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    async def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)


@contextlib.asynccontextmanager
async def browser(executable: str) -> AsyncIterator[Page]:
    """A fresh browser with an empty profile, and its one tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Not sandboxed: it opens only our own page, and in containers the sandbox cannot start.
        process = await asyncio.create_subprocess_exec(
            executable,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--remote-debugging-port=0", "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session, _tab(session, port) as page:
                yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()


async def _port(path: Path, process: asyncio.subprocess.Process) -> int:
    end = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().strip()):
        assert process.returncode is None, f"the browser ended with status {process.returncode}"
        assert time.monotonic() < end, "the browser opened no debugging port"
        await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])


@contextlib.asynccontextmanager
async def _tab(session: aiohttp.ClientSession, port: int) -> AsyncIterator[Page]:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        target = next(t for t in await answer.json() if t["type"] == "page")
    async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
        page = Page(socket)
        reading = asyncio.create_task(page.read())
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.send(f"{domain}.enable")
            yield page
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
