"""Findings of the network: RDMA devices, GPUDirect, GDRCopy, what IBGDA needs. Facts in, findings out.

Without an RDMA device all of it is fine: ranks of one machine need none.
"""

from __future__ import annotations

from collections.abc import Iterator

from epcy.doctor.finding import FAILURE, OK, WARNING, Facts, Finding

__all__ = ["judge"]


def judge(facts: Facts) -> list[Finding]:
    """Judge what one process has read. Local."""
    if not facts["rdma"]:
        return [Finding("RDMA", OK, "no device; ranks of one machine need none")]
    found = list(ports(facts))
    if facts["cuda"]["gpus"]:
        found += [*gpudirect(facts), gdrcopy(facts), ibgda(facts)]
    return found


def ports(facts: Facts) -> Iterator[Finding]:
    for port in facts["rdma"]:
        is_roce = port["link_layer"] == "Ethernet"
        kind = "RoCE" if is_roce else port["link_layer"] or "unknown link layer"
        name, seen = f"RDMA {port['device']}:{port['port']}", f"{kind}, {port['state']}, {port['rate']}"
        if port["state"] != "ACTIVE":
            yield Finding(
                name, WARNING, seen,
                "plug the cable, start the subnet manager (InfiniBand) or bring the interface up (RoCE); or leave the "
                "device out with NVSHMEM_ENABLE_NIC_PE_MAPPING=1 and NVSHMEM_HCA_LIST",
            )  # fmt: skip
        elif not port["usable"]:
            yield Finding(
                name, FAILURE, f"{seen}; this user cannot open it",
                "give read and write rights on /dev/infiniband/uverbs*; in a container --device=/dev/infiniband",
            )  # fmt: skip
        elif is_roce and not any("v2" in kind for kind in port["gid_types"]):
            yield Finding(
                name, WARNING, f"{seen}; no GID of type RoCE v2",
                "give the interface an IP address; then set NVSHMEM_IB_GID_INDEX to a RoCE v2 entry of gid_attrs/types",
            )  # fmt: skip
        else:
            yield Finding(name, OK, seen)


def gpudirect(facts: Facts) -> Iterator[Finding]:
    modules, all_gpus = facts["modules"], facts["cuda"]["gpus"]
    peer = modules["nvidia_peermem"] is not None or modules["nv_peer_mem"] is not None
    dma_buf = all(gpu["dma_buf"] for gpu in all_gpus)
    if not all(gpu["gpudirect_rdma"] for gpu in all_gpus):
        yield Finding(
            "GPUDirect RDMA", FAILURE, "the driver says that a GPU has none",
            "use data-centre GPUs; in a virtual machine pass the GPU and the NIC through",
        )  # fmt: skip
    elif peer or dma_buf:
        ways = [name for name, has in (("nvidia_peermem", peer), ("dma-buf", dma_buf)) if has]
        yield Finding("GPUDirect RDMA", OK, " and ".join(ways))
    else:
        yield Finding(
            "GPUDirect RDMA", FAILURE, "neither nvidia_peermem is loaded nor dma-buf supported",
            "modprobe nvidia_peermem, or install the open kernel modules of the driver (dma-buf, Linux 5.12 or later)",
        )  # fmt: skip


def gdrcopy(facts: Facts) -> Finding:
    has = facts["gdrcopy"]
    version = facts["modules"]["gdrdrv"]
    if has["device"] and has["library"]:
        return Finding("GDRCopy", OK, f"gdrdrv {version or ''}".rstrip() + " and libgdrapi")
    missing = [
        name
        for name, there in (("/dev/gdrdrv", has["device"]), ("libgdrapi.so", has["library"]))
        if not there
    ]
    return Finding(
        "GDRCopy", WARNING, f"{' and '.join(missing)} not there",
        "install GDRCopy and modprobe gdrdrv: NVSHMEM's proxy is slow in small messages without it; or set "
        "NVSHMEM_DISABLE_GDRCOPY=1 to say so",
    )  # fmt: skip


def ibgda(facts: Facts) -> Finding:
    """IBGDA: the GPU rings the NIC's doorbell itself, or GDRCopy lets the CPU do it."""
    params = (facts["nvidia"] or {}).get("params", {})
    mapped = "PeerMappingOverride=1" in params.get("RegistryDwords", "").replace(" ", "")
    stream = params.get("EnableStreamMemOPs") == "1"
    mellanox = [port["device"] for port in facts["rdma"] if port["device"].startswith("mlx5")]
    plugin = "ibgda" in facts["nvshmem"].get("transports", ())
    if not mellanox:
        return Finding(
            "IBGDA", WARNING, "no mlx5 device", "it needs ConnectX NICs; rdma_transport='proxy' does not"
        )
    if not plugin:
        return Finding(
            "IBGDA", WARNING, "NVSHMEM has no ibgda plug-in here", "install nvidia-nvshmem-cu13, which has it"
        )
    if mapped:
        more = "" if stream else "; EnableStreamMemOPs is off, which older drivers want on"
        return Finding("IBGDA", OK, f"PeerMappingOverride=1: the GPU can ring the NIC{more}")
    if facts["gdrcopy"]["device"] and facts["gdrcopy"]["library"]:
        return Finding("IBGDA", OK, "by way of the CPU (GDRCopy): PeerMappingOverride is not set")
    return Finding(
        "IBGDA", WARNING, "the driver's PeerMappingOverride is not set, and there is no GDRCopy",
        'put options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;" into '
        "/etc/modprobe.d/nvidia.conf, update-initramfs -u, reboot; or install GDRCopy",
    )  # fmt: skip
