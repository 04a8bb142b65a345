"""A client for etcd v3 that knows nothing of rendezvous: members of a cluster, streams, watches, leases, messages.

May import `errors` only.
"""
