"""Messages reworded for scripts, where a flag is an argument of `Peer.attach`."""

import re

_ONE = {
    "dir": "folder",
    "invite": "invite",
    "swarm-id": "swarm_id",
    "listen": "listen",
    "name": "name",
}
_SEVERAL = {"join": "join", "trust": "trust", "advertise": "advertise"}
_SWITCHES = {"insecure-plaintext": "plaintext=True", "debug": "debug=True"}

# A command to be typed (`gossamer id --dir D`) is left as it is. A flag's value is taken along if it is a
# PLACEHOLDER or a path.
_FLAG = re.compile(
    r"(?P<command>gossamer [a-z]+(?: [A-Z_]+| --[a-z-]+(?: (?!--)[^\s;,]+)?)+)"
    r"|--(?P<flag>[a-z-]+)(?: (?P<value>[A-Z_:]{2,}|[/~]\S+))?"
)


def for_a_script(text: str) -> str:
    """A command's message in a script's terms: ``--join ADDRESS`` becomes ``join=[ADDRESS]``."""
    return _FLAG.sub(_as_argument, text)


def _as_argument(found: re.Match[str]) -> str:
    flag, value = found["flag"], found["value"] or ""
    if found["command"]:
        return found[0]
    if flag in _SWITCHES:
        return _SWITCHES[flag] + (f" {value}" if value else "")
    if flag in _ONE:
        return f"{_ONE[flag]}={value}"
    if flag in _SEVERAL:
        return f"{_SEVERAL[flag]}={f'[{value}]' if value else ''}"
    return found[0]
