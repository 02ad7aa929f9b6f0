"""What `gossamer` does for a node, one function a command.

They import what they need as they run: help and mistakes in flags then take no longer than Python itself.
"""
