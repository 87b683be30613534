"""Findings of one machine: MPI, memory, GPUs, NVSHMEM. Facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from epcy.doctor.finding import FAILURE, OK, WARNING, Facts, Finding, gib

__all__ = ["judge"]

NVSHMEM = (3, 4)  # the structures of another minor version differ
SMALL_SHM = 2**30
# What cuInit says, and what helps.
CUDA_REMEDIES = {
    -1: "install NVIDIA's driver; in a container start it with --gpus all",
    100: "look at CUDA_VISIBLE_DEVICES, and in a container at --gpus",
    802: "start the service nvidia-fabricmanager of the driver's very version",
    803: "reboot, or reload the driver: the library and the kernel module are of different versions",
}
FAMILIES = (
    ("MPICH", "MPICH", "HYDRA"),
    ("Open MPI", "Open MPI", "OpenRTE", "open-mpi", "PRRTE"),
    ("Intel MPI", "Intel(R) MPI"),
)


def judge(facts: Facts) -> list[Finding]:
    """Judge what one process has read. Local."""
    return [*mpi(facts), *memory(facts), *gpus(facts), *nvshmem(facts)]


def mpi(facts: Facts) -> Iterator[Finding]:
    said = facts["mpi"]
    if said["error"]:
        yield Finding(
            "MPI library", FAILURE, f"mpi4py.MPI cannot be imported: {said['error']}",
            "pip install 'epcy[mpi]' brings a library; on a cluster load its MPI module, and build mpi4py against it",
        )  # fmt: skip
        return
    library = " ".join(said["library"].splitlines()[0].split())
    yield Finding("MPI library", OK, library)
    launch = facts["launch"]
    if launch is not None and launch["size"] > 1 and facts["size"] == 1:
        yield Finding(
            "MPI launcher", FAILURE,
            f"{launch['name']} started {launch['size']} processes ({launch['variable']}), and each of them is alone: "
            f"mpi4py's library is {library}",
            f"start the job with the mpiexec of that library ({said['mpiexec'] or 'none on PATH'}: "
            f"{said['launcher'] or 'unknown'}), or rebuild mpi4py with the launcher's MPI: "
            "pip install --no-binary mpi4py --force-reinstall mpi4py",
        )  # fmt: skip
        return
    ours, theirs = _family(library), _family(said["launcher"] or "")
    started = "" if launch is None else f", {facts['size']} ranks started by {launch['name']}"
    if said["mpiexec"] is None and launch is None:
        yield Finding(
            "MPI launcher", WARNING, "no mpiexec on PATH or beside python",
            "use the site's launcher (srun), or pip install 'epcy[mpi]'",
        )  # fmt: skip
    elif ours and theirs and ours != theirs and launch is None:
        yield Finding(
            "MPI launcher", WARNING, f"{said['mpiexec']} is {said['launcher']}, mpi4py's library is {library}",
            f"use the mpiexec of {ours}: with this one every process would be alone",
        )  # fmt: skip
    else:
        yield Finding("MPI launcher", OK, f"{said['launcher'] or said['mpiexec'] or 'the site’s'}{started}")


def _family(text: str) -> str | None:
    return next(
        (name for name, *words in FAMILIES if any(word.lower() in text.lower() for word in words)), None
    )


def memory(facts: Facts) -> Iterator[Finding]:
    shm = facts["shm"]
    if shm is None or not shm["writable"]:
        yield Finding(
            "shared memory", FAILURE, f"/dev/shm is {'not there' if shm is None else 'not writable'}",
            "mount a tmpfs there with mode 1777: MPI's shared windows, and the host backend's memory, lie in it",
        )  # fmt: skip
    else:
        seen = f"/dev/shm: {gib(shm['free_bytes'])} free of {gib(shm['bytes'])}"
        if shm["free_bytes"] < SMALL_SHM:
            yield Finding(
                "shared memory", WARNING, seen,
                "in a container start it with --shm-size=8g, else remount it larger (mount -o remount,size=8g "
                "/dev/shm); Buffer.size_hint() says what a Buffer of the host backend takes",
            )  # fmt: skip
        else:
            yield Finding("shared memory", OK, seen)
        left = f"{shm['num_mpi_files']} files of MPI's in /dev/shm, {gib(shm['mpi_bytes'])}; epcy makes none"
        if shm["mpi_bytes"] > shm["bytes"] // 4:
            yield Finding(
                "MPI's own memory", WARNING, left,
                "if no job runs here they are leftovers of killed ones: remove them by hand (ls -l /dev/shm)",
            )  # fmt: skip
        else:
            yield Finding("MPI's own memory", OK, left)
    limit = facts["memlock_bytes"]
    if limit is None:
        yield Finding("locked memory", WARNING, "the limit cannot be read", "mount /proc")
    elif limit >= 0 and facts["rdma"]:
        yield Finding(
            "locked memory", FAILURE, f"limit {limit // 1024} KiB, and RDMA registers whole heaps",
            "ulimit -l unlimited before the launcher; in a container --ulimit memlock=-1; under Slurm "
            "PropagateResourceLimitsExcept=MEMLOCK",
        )  # fmt: skip
    else:
        enough = "unlimited" if limit < 0 else f"limit {limit // 1024} KiB, which suffices without RDMA"
        yield Finding("locked memory", OK, enough)


def gpus(facts: Facts) -> Iterator[Finding]:
    cuda, wanted = facts["cuda"], facts["environ"].get("EPCY_BACKEND") == "nvshmem"
    if cuda["error"] or not cuda["gpus"]:
        why = cuda["error"] or "the driver sees none"
        remedy = CUDA_REMEDIES.get(
            cuda.get("code", 0), "look at nvidia-smi, and at dmesg for lines with NVRM"
        )
        if wanted or facts["nvidia"] is not None:
            yield Finding("GPUs", FAILURE, f"none can be used: {why}", remedy)
        else:
            yield Finding("GPUs", OK, f"none ({why}); the host backend needs none")
        return
    built = facts["build"].get("cuda") or ""
    archs = [int(one) for one in re.findall(r"\d+", built.rpartition("sm_")[2])] if "sm_" in built else []
    for index, gpu in enumerate(cuda["gpus"]):
        major, minor = gpu["compute_capability"]
        seen = f"{gpu['name']}, sm_{major}{minor}"
        if not archs:
            yield Finding(
                f"GPU {index}", FAILURE if wanted else WARNING, f"{seen}; epcy was built without CUDA",
                "build it where nvcc and NVSHMEM are (EPCY_CUDA=1), or install a wheel that has kernels",
            )  # fmt: skip
        elif not any(arch // 10 == major and arch % 10 <= minor for arch in archs):
            yield Finding(
                f"GPU {index}", FAILURE, f"{seen}; the kernels are for {', '.join(f'sm_{a}' for a in archs)}",
                f"build with EPCY_CUDA_ARCH={major}{minor}",
            )  # fmt: skip
        else:
            yield Finding(f"GPU {index}", OK, f"{seen}; kernels for {', '.join(f'sm_{a}' for a in archs)}")
    yield from _pairs(cuda)
    yield _driver(facts)


def _pairs(cuda: dict[str, Any]) -> Iterator[Finding]:
    """Peer access and NVLink of each pair of GPUs; pairs that are alike are told together."""
    kinds: dict[tuple[bool, bool | None], list[str]] = {}
    for pair in cuda["pairs"]:
        if pair["from"] < pair["to"]:
            back = next(p for p in cuda["pairs"] if (p["from"], p["to"]) == (pair["to"], pair["from"]))
            peer = pair["peer_access"] and back["peer_access"]
            kinds.setdefault((peer, pair["nvlink"]), []).append(f"{pair['from']}-{pair['to']}")
    for (peer, nvlink), names in kinds.items():
        those = f"GPUs {', '.join(names)}"
        if not peer:
            yield Finding(
                "peer access", FAILURE, f"{those}: none",
                "let ranks use GPUs that reach each other (CUDA_VISIBLE_DEVICES, nvidia-smi topo -p2p r); on PCIe "
                "turn off ACS and the IOMMU, in a virtual machine ask for passed-through NVLink",
            )  # fmt: skip
        elif nvlink is False:
            yield Finding(
                "peer access", WARNING, f"{those}: by PCIe, not NVLink",
                "expect a fraction of NVLink's rate; look at nvidia-smi nvlink -s if the machine has bridges",
            )  # fmt: skip
        else:
            yield Finding(
                "peer access", OK, f"{those}: {'NVLink' if nvlink else 'yes; NVML does not say by what'}"
            )


def _driver(facts: Facts) -> Finding:
    has = facts["cuda"]["driver_cuda"]
    version = (facts["nvidia"] or {}).get("driver") or "unknown version"
    found = re.search(r"nvcc (?:V|release )?(\d+)\.(\d+)", facts["build"].get("cuda") or "")
    seen = f"driver {version} (CUDA {has[0]}.{has[1]})" if has else f"driver {version}"
    if found is None or has is None:
        return Finding("driver and toolkit", OK, f"{seen}; epcy was built without a toolkit")
    needs = int(found[1]), int(found[2])
    if has[0] < needs[0]:
        return Finding(
            "driver and toolkit", FAILURE, f"{seen}; epcy was built with CUDA {needs[0]}.{needs[1]}",
            f"update the driver to one for CUDA {needs[0]}, or build epcy with CUDA {has[0]}",
        )  # fmt: skip
    return Finding("driver and toolkit", OK, f"{seen}; epcy was built with CUDA {needs[0]}.{needs[1]}")


def nvshmem(facts: Facts) -> Iterator[Finding]:
    said, has_gpus = facts["nvshmem"], bool(facts["cuda"]["gpus"])
    if "error" in said:
        if has_gpus:
            yield Finding("NVSHMEM", FAILURE, said["error"], "pip install 'epcy[cuda]'")
        else:
            yield Finding("NVSHMEM", OK, f"{said['error']}; without a GPU it is not needed")
        return
    version = ".".join(map(str, said["version"]))
    if tuple(said["version"][:2]) != NVSHMEM:
        yield Finding(
            "NVSHMEM", FAILURE, f"{version} in {said['path']}; epcy is for {NVSHMEM[0]}.{NVSHMEM[1]}",
            f"pip install 'nvidia-nvshmem-cu13=={NVSHMEM[0]}.{NVSHMEM[1]}.*', or point LD_LIBRARY_PATH at one",
        )  # fmt: skip
    else:
        yield Finding("NVSHMEM", OK, f"{version} in {said['path']}")
    found = said["transports"]
    if not found and facts["rdma"]:
        yield Finding(
            "transports", WARNING, "NVLink and PCIe alone: no nvshmem_transport_*.so beside the library",
            "install the whole package of NVSHMEM: without a plug-in it reaches no other machine",
        )  # fmt: skip
    else:
        yield Finding("transports", OK, ", ".join(["NVLink and PCIe (built in)", *found]))
