"""A client for etcd v3 that knows nothing of rendezvous.

`client` is its interface. `cluster` chooses the member to talk to, `stream` reopens broken streams, `watches` and
`keepalive` use one stream each, `counting` merges counts of keys, `messages` and `protobuf` encode and decode. May
import `errors` only.
"""
