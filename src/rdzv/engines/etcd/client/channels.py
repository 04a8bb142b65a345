"""gRPC channels to the members of a cluster, with the options that etcd needs."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import msgspec

REPLY_MAX = 256 * 1024 * 1024
"""Bytes. A list of ten thousand members has 5 MB; a reply above this limit cannot be rdzv's data."""
CONNECT_MS = 1000  # Timeout of one attempt to connect to one member; `Cluster.call` tries the others.
KEEPALIVE_MS = 10_000
"""Interval of HTTP/2 pings. etcd treats pings more often than every 5 s, or without a pending call, as an attack."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", REPLY_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A cluster's control plane is reached directly; an HTTP proxy for downloads would not let it through.
    ("grpc.enable_http_proxy", 0),
]


class Files(msgspec.Struct, frozen=True):
    """The contents of the certificate files of a channel; None for a file that is not used."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None

    def __repr__(self) -> str:
        return "Files(...)"  # The key is a secret.


def open_channel(target: str, files: Files | None) -> grpc.aio.Channel:
    """Make a channel to `host:port`, with TLS if there are files for it. Connects with the first call."""
    if files is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
    return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
