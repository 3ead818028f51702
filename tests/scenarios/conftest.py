"""A real cluster for each file of scenarios: etcd, controller, three agents with two ranks each."""

from __future__ import annotations

import pytest

from tests.audit import processes_with
from tests.scenarios.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, corpus):
    """Nothing of it may be alive once it has stopped."""
    directory = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_TEST_MARK", str(directory))
        with Cluster(directory, corpus) as running:
            yield running
        assert processes_with(f"EVERSTEP_TEST_MARK={directory}") == {}
