"""The rules of rendezvous, pure: no clock, no randomness, no I/O, no logging, no asyncio. A test keeps it so."""
