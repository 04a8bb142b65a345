"""The node that the code runs on: clock, timers, sockets, addresses, forks, and the background thread of the blocking API.

Knows nothing of rendezvous. May import `errors` only.
"""
