"""epcy.init where the nvshmem backend cannot work, and with wrong arguments."""

import pytest

import epcy
from epcy import backends


def test_init_says_why_nvshmem_cannot_work():
    try:
        backends.find("nvshmem")
    except epcy.BackendUnavailableError as unavailable:
        with pytest.raises(epcy.BackendUnavailableError) as raised:
            epcy.init()
        assert str(raised.value) == str(unavailable)
    else:
        pytest.skip("it can, here")


@pytest.mark.parametrize("heap_bytes", [-1, 1.5, "many", True])
def test_init_checks_its_arguments(heap_bytes):
    with pytest.raises(epcy.ArgumentError, match="heap_bytes"):
        epcy.init(heap_bytes=heap_bytes)
    with pytest.raises(epcy.ArgumentError, match="device"):
        epcy.init(device=-1)
