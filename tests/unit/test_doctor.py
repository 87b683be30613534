"""The doctor's findings on machines that are built of files: what is wrong is told, and what to do about it."""

import json
import os
import subprocess
import sys

import pytest

from epcy import info
from epcy.doctor import Finding, examine, facts, ranks, render, report
from epcy.doctor.finding import FAILURE, OK, WARNING
from parallel import ROOT

GPU = {
    "name": "NVIDIA H200",
    "bus": "00",
    "compute_capability": [9, 0],
    "gpudirect_rdma": True,
    "dma_buf": False,
}
PAIRS = [
    {"from": a, "to": b, "peer_access": True, "nvlink": True} for a in range(2) for b in range(2) if a != b
]
CUDA = {"gpus": [GPU, GPU], "pairs": PAIRS, "error": None, "code": 0, "driver_cuda": [13, 0]}
NVSHMEM = {"version": [3, 4, 5], "path": "/x/libnvshmem_host.so.3", "transports": ["ibgda", "ibrc"]}
BUILD = {"cuda": "nvcc V13.0.88, NVSHMEM 3.4.5, sm_90"}
MPI = {"library": "MPICH Version:  5.0.2", "error": None, "mpiexec": "/m", "launcher": "HYDRA 5.0.2"}
MODPROBE = 'RegistryDwords: "PeerMappingOverride=1;"\nEnableStreamMemOPs: 1\n'


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Build a machine with GPUs, an InfiniBand NIC and everything in order; tests spoil one thing each."""

    class Machine:
        cuda, nvshmem, build, mpi = dict(CUDA), dict(NVSHMEM), dict(BUILD), dict(MPI)
        free, total = 8 << 30, 16 << 30
        environ: dict = {}

        def write(self, name, text=""):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def remove(self, name):
            subprocess.run(["rm", "-r", str(tmp_path / name)], check=True)

        def findings(self):
            return examine(tmp_path, self.environ)[0]

        def finding(self, name):
            found = [one for one in self.findings() if one.name == name]
            assert len(found) == 1, found
            return found[0]

    m = Machine()
    m.write("dev/gdrdrv")
    (tmp_path / "dev/shm").mkdir()
    m.write("usr/lib64/libgdrapi.so.2")
    m.write("sys/module/gdrdrv/version", "2.5\n")
    m.write("sys/module/nvidia_peermem/version", "580.65.06\n")
    m.write("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n")
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13\n"
    )
    m.write("proc/driver/nvidia/version", version)
    m.write("proc/driver/nvidia/params", MODPROBE)
    port = "sys/class/infiniband/mlx5_0/ports/1"
    for name, text in (
        ("link_layer", "InfiniBand\n"), ("state", "4: ACTIVE\n"), ("rate", "400 Gb/sec (4X NDR)\n"),
        ("gid_attrs/types/0", "IB/RoCE v1\n"),
    ):  # fmt: skip
        m.write(f"{port}/{name}", text)
    m.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
    m.write("dev/infiniband/uverbs0")
    m.port = port

    class Statvfs:
        f_frsize = 4096

        def __init__(self, path):
            os.stat(path)
            self.f_blocks, self.f_bavail = m.total // 4096, m.free // 4096

    monkeypatch.setattr(facts.os, "statvfs", Statvfs)
    monkeypatch.setattr(info, "ask", lambda code: m.cuda if "libcuda" in code else m.nvshmem)
    versions = {"epcy": "0", "python": "3.11.7"}
    monkeypatch.setattr(
        info, "collect_basics", lambda: {"versions": versions, "build": m.build, "mpi": m.mpi}
    )
    return m


def test_all_in_order(machine):
    found = machine.findings()
    assert {one.state for one in found} == {OK}, render(found)
    names = [one.name for one in found]
    for name in (
        "MPI library", "MPI launcher", "shared memory", "locked memory", "GPU 0", "GPU 1", "peer access",
        "driver and toolkit", "NVSHMEM", "transports", "RDMA mlx5_0:1", "GPUDirect RDMA", "GDRCopy", "IBGDA",
    ):  # fmt: skip
        assert names.count(name) == 1, name
    assert machine.finding("RDMA mlx5_0:1").text == "InfiniBand, ACTIVE, 400 Gb/sec (4X NDR)"
    assert "ibgda" in machine.finding("transports").text
    assert report.status(found, strict=True) == 0


def spoil(**changes):
    """A change of a machine: of its attributes, or of a file's text (None: removed)."""

    def do(m):
        for name, value in changes.items():
            if isinstance(value, dict):
                setattr(m, name, {**getattr(m, name), **value})
            else:
                setattr(m, name, value)

    return do


def files(**changes):
    def do(m):
        for name, text in changes.items():
            path = name.replace("__", "/").replace("PORT", m.port)
            m.remove(path) if text is None else m.write(path, text)

    return do


NO_PEERS = [{**pair, "peer_access": pair["from"] == 0} for pair in PAIRS]
BY_PCIE = [{**pair, "nvlink": False} for pair in PAIRS]
SPOILED = [
    (spoil(mpi={"error": "cannot load", "library": None}), "MPI library", FAILURE, "cannot load", "epcy[mpi]"),
    (spoil(mpi={"launcher": "mpiexec (OpenRTE) 4.1.4"}), "MPI launcher", WARNING, "OpenRTE", "mpiexec of MPICH"),
    (spoil(mpi={"mpiexec": None, "launcher": None}), "MPI launcher", WARNING, "no mpiexec", "epcy[mpi]"),
    (spoil(free=64 << 20, total=64 << 20), "shared memory", WARNING, "64 MiB free", "--shm-size"),
    (files(dev__shm=None), "shared memory", FAILURE, "not there", "tmpfs"),
    (files(proc__self__limits="Max locked memory  8388608  x  bytes"), "locked memory", FAILURE, "8192 KiB", "memlock"),
    (files(proc__self__limits=None), "locked memory", WARNING, "cannot be read", "/proc"),
    (spoil(cuda={"gpus": [], "error": "cuInit: x", "code": 802}), "GPUs", FAILURE, "cuInit", "fabricmanager"),
    (spoil(build={"cuda": "nvcc V13.0.88, NVSHMEM 3.4.5, sm_100"}), "GPU 0", FAILURE, "sm_100", "EPCY_CUDA_ARCH=90"),
    (spoil(build={"cuda": None}), "GPU 0", WARNING, "without CUDA", "EPCY_CUDA=1"),
    (spoil(cuda={"pairs": NO_PEERS}), "peer access", FAILURE, "GPUs 0-1: none", "topo"),
    (spoil(cuda={"pairs": BY_PCIE}), "peer access", WARNING, "PCIe", "NVLink"),
    (spoil(cuda={"driver_cuda": [12, 8]}), "driver and toolkit", FAILURE, "CUDA 12.8", "CUDA 13"),
    (spoil(nvshmem={"version": [3, 7, 2]}), "NVSHMEM", FAILURE, "3.7.2", "3.4"),
    (spoil(nvshmem={"error": "not found"}), "NVSHMEM", FAILURE, "not found", "epcy[cuda]"),
    (spoil(nvshmem={"transports": []}), "transports", WARNING, "no nvshmem_transport", "package"),
    (files(PORT__state="1: DOWN\n"), "RDMA mlx5_0:1", WARNING, "DOWN", "cable"),
    (files(dev__infiniband=None), "RDMA mlx5_0:1", FAILURE, "cannot open", "/dev/infiniband"),
    (files(PORT__link_layer="Ethernet\n"), "RDMA mlx5_0:1", WARNING, "RoCE", "GID_INDEX"),
    (files(sys__module__nvidia_peermem=None), "GPUDirect RDMA", FAILURE, "dma-buf", "modprobe nvidia_peermem"),
    (spoil(cuda={"gpus": [{**GPU, "gpudirect_rdma": False}]}), "GPUDirect RDMA", FAILURE, "has none", "virtual"),
    (files(dev__gdrdrv=None), "GDRCopy", WARNING, "/dev/gdrdrv not there", "modprobe gdrdrv"),
    (files(usr__lib64=None), "GDRCopy", WARNING, "libgdrapi.so not there", "GDRCopy"),
    (files(usr__lib64=None, proc__driver__nvidia__params="x: 1"), "IBGDA", WARNING, "PeerMapping", "modprobe.d"),
    (spoil(nvshmem={"transports": ["ibrc"]}), "IBGDA", WARNING, "plug-in", "nvidia-nvshmem"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SPOILED)), ids=[f"{one[1]}-{one[3]}" for one in SPOILED])
def test_what_is_wrong_is_told(machine, number):
    change, name, state, text, remedy = SPOILED[number]
    change(machine)
    found = machine.finding(name)
    assert found.state == state, found
    assert text in found.text and remedy in found.remedy
    assert report.status([found]) == (state == FAILURE) and report.status([found], strict=True) == 1
    assert f"{state:<7}  {name}  {found.text}\n" in render([found]) and f"-> {found.remedy}" in render(
        [found]
    )


def test_roce_with_an_address(machine):
    machine.write(f"{machine.port}/link_layer", "Ethernet\n")
    machine.write(f"{machine.port}/gid_attrs/types/3", "RoCE v2\n")
    found = machine.finding("RDMA mlx5_0:1")
    assert found.state == OK and found.text.startswith("RoCE, ACTIVE")


def test_ways_that_stand_in(machine):
    """dma-buf without nvidia_peermem, GDRCopy without PeerMappingOverride."""
    machine.cuda["gpus"] = [{**GPU, "dma_buf": True}]
    machine.remove("sys/module/nvidia_peermem")
    machine.write("proc/driver/nvidia/params", "EnableStreamMemOPs: 1\n")
    assert machine.finding("GPUDirect RDMA") == Finding("GPUDirect RDMA", OK, "dma-buf")
    assert "GDRCopy" in machine.finding("IBGDA").text and machine.finding("IBGDA").state == OK


def test_a_machine_without_gpus(machine):
    machine.cuda.update(gpus=[], pairs=[], error="libcuda.so.1: not there", code=-1)
    machine.nvshmem = {"error": "not found"}
    machine.remove("proc/driver")
    machine.remove("sys/class")
    assert {one.state for one in machine.findings()} == {OK}
    machine.environ = {"EPCY_BACKEND": "nvshmem"}
    assert machine.finding("GPUs").state == FAILURE


def test_files_of_mpi(machine):
    machine.write("dev/shm/mpich_shar_tmpabc", "x" * 1000)
    machine.write("dev/shm/somebody_else", "x" * 1000)
    found = machine.finding("MPI's own memory")
    assert found.state == OK and found.text.startswith("1 files")
    machine.total = 4096
    machine.free = 4096
    machine.write("dev/shm/vader_segment.1", "x" * 4096)
    found = machine.finding("MPI's own memory")
    assert found.state == WARNING and found.text.startswith("2 files")


def test_a_probe_that_dies(machine):
    machine.cuda = {"error": "the process ended with -11"}
    assert machine.finding("GPUs").state == FAILURE


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, ("MPICH", 4, 2)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMI_SIZE": "1"}, ("Open MPI", 4, 0)),
        ({"PMI_SIZE": "many", "PMI_RANK": "2"}, None),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
    ],
)  # fmt: skip
def test_who_started_us(environ, expected):
    found = facts.launched(environ)
    assert (found and (found["name"], found["size"], found["rank"])) == expected


def test_ranks_that_differ(machine, tmp_path):
    one = facts.gather(tmp_path, {"EPCY_TIMEOUT": "5", "EPCY_DEVICE": "0"})
    other = facts.gather(tmp_path, {"EPCY_TIMEOUT": "6", "EPCY_DEVICE": "1"})
    other["versions"] = {**one["versions"], "epcy": "1"}
    found = {f.name: f for f in ranks.compare([one, other, other])}
    assert found["ranks"].state == OK and found["epcy's version"].state == FAILURE
    assert found["epcy's version"].text == "0 on rank 0; 1 on ranks 1, 2"
    assert found["EPCY_TIMEOUT"].state == WARNING and "EPCY_DEVICE" not in found
    assert found["GPU of each rank"].text.startswith("3 ranks share 2 GPUs")
    assert "driver" in found["equal on all ranks"].text
    other["host"] = "elsewhere"
    found = {f.name: f for f in ranks.compare([one, other])}
    assert found["ranks"].state == WARNING and "elsewhere" in found["ranks"].text


def test_findings_of_several_ranks():
    a, b, c = Finding("a", OK, "x"), Finding("b", OK, "x"), Finding("b", WARNING, "y", "z")
    merged = ranks.merge([[a, b], [a, c], [a, b]])
    assert [(one.name, one.state, one.ranks) for one in merged] == [
        ("a", OK, (0, 1, 2)), ("b", OK, (0, 2)), ("b", WARNING, (1,)),
    ]  # fmt: skip
    text = render(merged, 3)
    assert "(rank 1)" in text and "(ranks 0, 2)" in text and "0, 1, 2" not in text


def run(*arguments, **env):
    outer = ("PMI_", "PMIX_", "OMPI_", "HYDI_", "PALS_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return subprocess.run(
        [sys.executable, "-m", "epcy", "doctor", *arguments], env={**inherited, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_command(tmp_path):
    done = run("--json", EPCY_TIMEOUT="7")
    said = json.loads(done.stdout)
    assert said["schema"] == 1 and said["num_ranks"] == 1 and len(said["facts"]) == 1
    assert said["facts"][0]["environ"]["EPCY_TIMEOUT"] == "7"
    assert done.returncode == any(one["state"] == FAILURE for one in said["findings"]), done.stderr
    done = run("--root", str(tmp_path))  # a machine of which nothing can be read
    assert done.returncode == 1 and "/dev/shm is not there" in done.stdout


def test_a_launcher_of_another_mpi():
    """mpiexec of an MPI that mpi4py is not built against: every process is rank 0 of 1."""
    pytest.importorskip("mpi4py.MPI")
    size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    if "Open MPI" in info.collect_basics()["mpi"]["library"]:
        size, rank = "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"
    done = run(**{size: "2", rank: "0"})
    assert done.returncode == 1, done.stdout
    line = next(line for line in done.stdout.splitlines() if "MPI launcher" in line)
    assert line.startswith("failure") and "2 processes" in line and "each of them is alone" in line
    done = run(**{size: "2", rank: "1"})
    assert done.returncode == 1 and done.stdout == ""  # one report
