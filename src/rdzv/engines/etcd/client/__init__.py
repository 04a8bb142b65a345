"""A client for etcd v3 that knows nothing of rendezvous.

`client` is its interface, with the renewal of leases. `cluster` chooses the member to talk to, `stream` reopens broken
streams, `watches` has one for all watches, `counting` merges counts of keys, `messages` and `protobuf` encode and
decode. May import `errors` only.
"""

from .fork import import_grpc

import_grpc()  # Before the modules that import gRPC as usual.
