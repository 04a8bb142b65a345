"""Clusters that the tests of the etcd engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.etcd_cluster import Cluster


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster
