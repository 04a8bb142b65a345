"""What people do with a run from outside: read its status and journal, diagnose a node, drain, ban, close, adopt.

May import everything below the public API. `cli` presents it.
"""
