"""epcy.init where the nvshmem backend cannot work, and with wrong arguments."""

import pytest

import epcy
from epcy import backends, startup


def test_init_says_why_nvshmem_cannot_work():
    try:
        backends.find("nvshmem")
    except epcy.BackendUnavailableError as unavailable:
        with pytest.raises(epcy.BackendUnavailableError) as raised:
            epcy.init()
        assert str(raised.value) == f"{unavailable} (rank 0)"
    else:
        pytest.skip("it can, here")


@pytest.mark.parametrize("heap_bytes", [-1, 1.5, "many", True])
def test_init_checks_its_arguments(heap_bytes):
    with pytest.raises(epcy.ArgumentError, match=r"heap_bytes: expected .*\(rank 0\)$"):
        epcy.init(heap_bytes=heap_bytes)
    with pytest.raises(epcy.ArgumentError, match=r"device: expected .*\(rank 0\)$"):
        epcy.init(device=-1)


@pytest.fixture
def settle(monkeypatch):
    """A function that settles options in a process that has not yet; returns what is in its environment then."""
    monkeypatch.setattr(startup, "_settled", None)
    environ = {}

    def make(num_qps_per_rank=None, rdma_transport="auto", backend="nvshmem", **user):
        environ.update(user)
        options = {"num_qps_per_rank": num_qps_per_rank, "rdma_transport": rdma_transport}
        startup.settle(backend, options, environ)
        return environ

    return make


def test_settings_that_nvshmem_reads(settle):
    assert settle(4, "ibgda") == {
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": "4", "NVSHMEM_IB_ENABLE_IBGDA": "1", "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
    }  # fmt: skip
    assert startup.settled() == {"num_qps_per_rank": 4, "rdma_transport": "ibgda"}


def test_the_proxy(settle):
    assert settle(rdma_transport="proxy") == {
        "NVSHMEM_IB_ENABLE_IBGDA": "0",
        "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
    }


def test_nothing_asked_for(settle):
    assert settle() == {} and settle(None, "auto") == {}
    assert settle(4, "proxy", backend="host") == {}


def test_settings_are_made_once(settle):
    settle(4)
    settle(4)
    settle()  # asks for nothing
    with pytest.raises(epcy.StateError, match=r"num_qps_per_rank: expected 4, .* got 8"):
        settle(8)
    with pytest.raises(epcy.StateError, match=r"rdma_transport: expected 'auto', .* got 'ibgda'"):
        settle(4, "ibgda")
    assert startup.settled() == {"num_qps_per_rank": 4, "rdma_transport": "auto"}


def test_started_without_settings(settle):
    settle()
    with pytest.raises(epcy.StateError, match="num_qps_per_rank: expected None"):
        settle(2)


def test_a_variable_of_the_users(settle):
    with pytest.raises(epcy.ArgumentError, match=r"num_qps_per_rank: 4 means .*RC_PER_PE=4, .* has '8'"):
        settle(4, NVSHMEM_IBGDA_NUM_RC_PER_PE="8")
    assert startup.settled() == {}
    settle(8)


@pytest.mark.parametrize(
    "transport, devices, seen",
    [
        ("ibgda", [], "mlx5 device .*has none"),
        ("ibgda", ["irdma0", "bnxt_re1"], "only irdma0, bnxt_re1"),
        ("proxy", [], "an RDMA device, .*has none"),
    ],
)
def test_a_transport_that_is_not_there(transport, devices, seen):
    with pytest.raises(
        epcy.BackendUnavailableError, match=f"rdma_transport: '{transport}' needs .*{seen}.*'auto'"
    ):
        startup.find_transport({"rdma_transport": transport}, devices)


def test_transports_that_are_there():
    for transport, devices in (("auto", []), ("ibgda", ["irdma0", "mlx5_1"]), ("proxy", ["irdma0"])):
        startup.find_transport({"rdma_transport": transport}, devices)
