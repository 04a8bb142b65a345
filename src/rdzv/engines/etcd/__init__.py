"""The engine on etcd v3: the driver and its watches, and a real etcd server to start for tests and single nodes.

`client` is the etcd client underneath. Only this package imports grpcio.
"""
