"""The embedded engine: the reference engine behind a TCP server, and the driver that talks to it.

Both ends share `frames` (the wire protocol), `tls` and `trust`. The server's side is `server`, `server_connection`, `run`,
`limits` and `lease_clock`; the client's side is `client`, `reconnecting`, `connection` and `dial`. `hosting` is the driver
that also starts the server where the endpoint means this node.
"""
