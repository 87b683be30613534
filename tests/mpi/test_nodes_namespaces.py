"""Two network namespaces, with host names of their own, as two machines: the tests of several nodes, TCP between them.

Needs root and `ip`, and MPICH's launcher, which is told to start the ranks of each "machine" in its namespace.
"""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest

from parallel import ROOT, mpiexec

TESTS = ("tests/mpi/test_nodes.py", "tests/mpi/test_exact.py", "tests/mpi/test_low_latency.py",
         "tests/mpi/test_nodes_faults.py", "tests/mpi/test_masked_ranks.py")  # fmt: skip
# A machine has two ranks here: what says otherwise, and jobs of their own, are left out.
SELECTED = "not the_option and not one_node and not different_sizes and not mid_call[ and not in_a_row"
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
case "$1" in *.1) at=A;; *) at=B;; esac
shift
exec ip netns exec NAME$at unshare --uts sh -c "hostname machine$at && exec $*" </dev/null
"""


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture
def namespaces(comm, backend, tmp_path):
    """The name of two joined namespaces, NAMEA at 10.213.77.1 and NAMEB at 10.213.77.2, and the launcher into them."""
    if comm.size > 1 or backend != "host":
        pytest.skip("a job of its own: run with one rank")
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare")
    name = f"epcy{os.getpid()}"
    try:
        for at in "AB":
            ip("netns", "add", name + at)
        # Made here and moved: UCX takes interfaces of one number for one interface.
        ip("link", "add", "epcyA", "type", "veth", "peer", "name", "epcyB")
        for at, number in (("A", 1), ("B", 2)):
            ip("link", "set", f"epcy{at}", "netns", name + at)
            ip("-n", name + at, "addr", "add", f"10.213.77.{number}/24", "dev", f"epcy{at}")
            for link in (f"epcy{at}", "lo"):
                ip("-n", name + at, "link", "set", link, "up")
        launcher = tmp_path / "launcher"
        launcher.write_text(LAUNCHER.replace("NAME", name))
        launcher.chmod(0o755)
        yield name, str(launcher)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    finally:
        for at in "AB":
            ip("netns", "del", name + at, check=False)


def bytes_sent(name):
    """Bytes that have left the first machine."""
    done = ip("netns", "exec", name + "A", "cat", "/sys/class/net/epcyA/statistics/tx_bytes", check=False)
    with contextlib.suppress(ValueError):
        return int(done.stdout)
    return int(
        ip("-n", name + "A", "-s", "link", "show", "epcyA").stdout.split("TX:")[1].splitlines()[1].split()[0]
    )


@pytest.mark.timeout(400)
def test_two_machines(namespaces):
    name, launcher = namespaces
    outer = ("PMI_", "PMIX_", "OMPI_COMM", "HYDI_", "PALS_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    # Without this UCX sees through the namespaces and takes shared memory.
    env |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "all", "PYTHONPATH": str(ROOT)}
    command = ["ip", "netns", "exec", name + "A", mpiexec() or pytest.skip("no mpiexec"), "-launcher", "ssh",
               "-launcher-exec", launcher, "-iface", "epcyA", "-hosts", "10.213.77.1:2,10.213.77.2:2", "-n", "4",
               sys.executable]  # fmt: skip
    show = "import epcy.topology as t; from mpi4py import MPI; f = t.discover(MPI.COMM_WORLD); f.rank or print(f)"
    done = subprocess.run(
        [*command, "-c", show], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if "2 nodes" not in done.stdout:
        pytest.skip(f"this launcher makes no two machines of them: {done.stdout}{done.stderr}")
    before = bytes_sent(name)
    done = subprocess.run(
        [*command, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, "-k", SELECTED],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    assert bytes_sent(name) - before > 10_000_000  # over the wire between them, and not through shared memory
