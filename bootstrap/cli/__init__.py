"""The `gossamer` command: one file a group of commands, all of them in `main`.

A command imports what it needs when it runs, so that help and mistakes in flags need neither NumPy nor torch.
"""
