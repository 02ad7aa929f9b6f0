"""The page that a node serves: HTML, CSS and JavaScript from this folder, as one document.

There is no build step. The scripts share one module scope, in the order of `SCRIPTS`; nothing is fetched
from anywhere but the node's own API. The policy allows exactly this style and this script, by their
SHA-256, so whatever text the network brings can never run.
"""

import base64
import hashlib
from functools import cache
from importlib import resources

SCRIPTS = (
    "format.js",
    "dom.js",
    "rounds.js",
    "stream.js",
    "frames.js",
    "graph.js",
    "threads.js",
    "timeline.js",
    "curves.js",
    "raster.js",
    "matrix.js",
    "header.js",
    "tables.js",
    "inspector.js",
    "main.js",
)
"""Definitions first: a file may use what those before it define, and `main.js` starts everything."""


def document() -> str:
    """The whole page."""
    return _read("index.html").replace("/*{style}*/", _style()).replace("/*{script}*/", _script())


def policy() -> str:
    """The value of the Content-Security-Policy header (CSP level 3) to serve `document()` with."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(_script())}'",
            f"style-src '{_digest(_style())}'",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


@cache
def _style() -> str:
    return _read("page.css")


@cache
def _script() -> str:
    return "\n".join(_read(name) for name in SCRIPTS)


def _read(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
