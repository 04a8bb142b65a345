"""The runtime of one member: it stays present, leads in its turn, takes rounds, and tells its holder of changes.

It asks `core` what to do and does it through the port of `engines`. May import `core`, `config`, `engines` (the port),
`system` and `errors`; never an engine's own package.
"""
