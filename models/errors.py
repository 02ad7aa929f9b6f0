"""The one error of this package, apart from the others so that catching it does not import torch.

    ValueError
      TaskError    a mistake of the user's in a task, its options or its data

Bugs (a wrong shape, a broken invariant) raise the usual built-in errors instead.
"""


class TaskError(ValueError):
    """A mistake in a task, its options or its data, which the user can put right.

    The message is one line that names what is wrong and says what to do; show it as it is.
    """
