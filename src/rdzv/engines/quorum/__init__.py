"""The engine on an etcd cluster that the job runs by itself: one member on each host of a short list.

`agreement` has the rules by which the hosts become voters, pure. `exchange` carries them over the peer port, `state` keeps
them on disk, `voter` runs one host's etcd, and `driver` is the etcd driver on top.
"""
