"""The rules of rendezvous, as pure functions: no clock, no randomness, no I/O, no logging, no asyncio.

`model`, `keys` and `wire` define the records and how they are stored. `view`, `rules`, `ranks`, `recovery` and `acts`
are the leader's decisions. `member` is what a member does about the head. `status` describes a run. May import `errors`
only.
"""
