"""Tasks: what a swarm trains (model, data, loss, evaluation). They know nothing of the network.

Start at `gossamer.models.task.Task`, the interface, and `gossamer.models.registry.build_task`,
which makes one of the tasks that come with Gossamer. This file imports nothing, so that a daemon
without PyTorch can live in the same installation.
"""

MESSAGE_LENGTH_MAX = 300


class TaskError(ValueError):
    """A mistake in a task, its options or its data, which the user can fix.

    The message is one line that names what is wrong and says what to do; show it as it is.
    """


def in_one_line(error: BaseException) -> str:
    """The text of another library's error, for a message of ours: on one line, printable, not too long."""
    words = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    if len(text) > MESSAGE_LENGTH_MAX:
        text = f"{text[:MESSAGE_LENGTH_MAX]} ..."
    return text or type(error).__name__
