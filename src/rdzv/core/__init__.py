"""The rules of rendezvous. Pure: no clock, no randomness, no I/O, no logging, no asyncio.

Records (`model`, `keys`, `wire`), what the leader sees and decides (`view`, `rules`, `ranks`, `recovery`, `acts`), what a
member does about the head (`member`), and how a run is described (`status`). May import `errors` only.
"""
