"""Tools for operators, who are no members: the status and journal of a run, a diagnosis of a node, drain, ban, close, adopt.

May import everything below the public API. `cli` makes commands of it.
"""
