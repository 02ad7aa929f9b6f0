"""Checks the arguments of `Peer.attach` before they are used."""

import os
from collections.abc import Collection, Iterator
from numbers import Integral

from gossamer.node.address import check_node_name, check_plaintext, check_swarm_id, parse_address
from gossamer.node.given import checked_advertise
from gossamer.node.training.starting import AttachOptions
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest


def check_arguments(options: AttachOptions) -> None:
    """Raise ConfigError for arguments that are wrong in any swarm."""
    if fault := next(_faults_of_kind(options), None):
        raise ConfigError(fault)
    host, _ = parse_address(options["listen"], port_min=0)
    if options["plaintext"]:
        check_plaintext(host)
    checked_advertise(options["advertise"])
    check_node_name(options["name"])
    if options["folder"] is not None and not os.fspath(options["folder"]):
        raise ConfigError("folder is empty: name the node's folder, or give None for the default")
    if options["swarm_id"] is not None:
        check_swarm_id(options["swarm_id"])
    stop_round = options["stop_round"]
    if not isinstance(stop_round, Integral) or stop_round < 0:  # NumPy's, too
        raise ConfigError(f"stop_round is {stop_round!r}: give the last round to publish, or 0 for none")


def _faults_of_kind(options: AttachOptions) -> Iterator[str]:
    """Messages about arguments of a wrong type, since scripts are seldom type-checked."""
    lists: dict[str, object] = {name: options[name] for name in ("join", "advertise", "trust")}
    for argument, given in lists.items():
        if isinstance(given, str):
            yield f"{argument} is a list: {argument}=[{given!r}]"
        elif not (given is None or _is_list_of_texts(given)):
            yield f"{argument} is {given!r:.60}: give a list of texts"
    texts: dict[str, object] = {name: options[name] for name in ("listen", "name", "swarm_id", "invite")}
    for argument, given in texts.items():
        if not (isinstance(given, str) or (given is None and argument in ("swarm_id", "invite"))):
            yield f"{argument} is {given!r:.60}: give a text"
    flags: dict[str, object] = {name: options[name] for name in ("plaintext", "debug")}
    for argument, given in flags.items():
        if not isinstance(given, bool):  # "no" would be true
            yield f"{argument} is {given!r:.60}: give True or False"
    folder, manifest = options["folder"], options["manifest"]
    if not (folder is None or _is_path(folder)):
        yield f"folder is {folder!r:.60}: give a path"
    if not (manifest is None or isinstance(manifest, Manifest) or _is_files_path(manifest)):
        yield f"manifest is {manifest!r:.60}: give a TOML file's path, or a Manifest"


def _is_list_of_texts(given: object) -> bool:
    return isinstance(given, Collection) and all(isinstance(text, str) for text in given)


def _is_path(given: object) -> bool:
    if not isinstance(given, str | os.PathLike):
        return False
    path = os.fspath(given)
    return isinstance(path, str) and "\0" not in path


def _is_files_path(given: object) -> bool:
    """Whether this is a path, and neither empty, as from an unset variable, nor the TOML itself."""
    return bool(given) and _is_path(given) and "\n" not in str(given)
