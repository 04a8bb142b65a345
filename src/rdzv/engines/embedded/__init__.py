"""The embedded engine: the reference engine behind a TCP server, and the driver that talks to it.

Without I/O, and so what the simulator runs too: `frames` (the wire protocol); `session`, `run`, `limits` and `server_core` on
the server's side; `client_protocol` on the client's. With asyncio: `stream` and `tls` move bytes, `server` and `lease_clock`
drive the server, `connection`, `dial` and `client` the client. `trust` holds secret and certificates. `hosting` is the driver
that also starts the server where the endpoint means this node.
"""
