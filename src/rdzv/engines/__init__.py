"""Engines, which keep runs. `port` is the contract that every engine keeps; `reference` is the engine that defines it.

Here are the port, the reference engine with its leases, the engine in this process's memory, and the queue under every
watch. Each other engine is a package of its own: `embedded`, `etcd`, `register`. Engines store; they know no rules of
rendezvous. May import `errors` only; the packages below may also import `system` and `config`.
"""
