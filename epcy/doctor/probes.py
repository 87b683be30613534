"""What the doctor asks in child processes: touching a GPU or loading a library can hang, or take a process down.

ctypes and NVIDIA's C interfaces, not CuPy or NVML's Python packages: what is examined may be what is missing.
"""

from __future__ import annotations

__all__ = ["GPUS", "NVSHMEM"]

GPUS = """
import ctypes, json
found = {"gpus": [], "pairs": [], "error": None, "code": 0, "driver_cuda": None}
def out():
    print(json.dumps(found))
    raise SystemExit
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    found["error"], found["code"] = str(error), -1
    out()
number = ctypes.c_int()
if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
    found["driver_cuda"] = [number.value // 1000, number.value % 1000 // 10]
def check(code, what):
    if code:
        name = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(name))
        found["error"], found["code"] = f"{what}: {(name.value or b'unknown error').decode()}", code
        out()
check(cuda.cuInit(0), "cuInit")
check(cuda.cuDeviceGetCount(ctypes.byref(number)), "cuDeviceGetCount")
try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    nvml = nvml if nvml.nvmlInit_v2() == 0 else None
except OSError:
    nvml = None
devices, handles = [], []
for index in range(number.value):
    device = ctypes.c_int()
    check(cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    cuda.cuDeviceGetName(name, 128, device)
    cuda.cuDeviceGetPCIBusId(bus, 32, device)
    def attribute(which):
        value = ctypes.c_int()
        return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device) == 0 else 0
    found["gpus"].append({"name": name.value.decode(), "bus": bus.value.decode(),
                          "compute_capability": [attribute(75), attribute(76)],
                          "gpudirect_rdma": bool(attribute(116)), "dma_buf": bool(attribute(124))})
    handle = ctypes.c_void_p()
    good = nvml is not None and nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)) == 0
    devices.append(device)
    handles.append(handle if good else None)
for a in range(len(devices)):
    for b in range(len(devices)):
        if a == b:
            continue
        peer, link = ctypes.c_int(), ctypes.c_int(-1)
        check(cuda.cuDeviceCanAccessPeer(ctypes.byref(peer), devices[a], devices[b]), "cuDeviceCanAccessPeer")
        nvlink = None
        pair = handles[a], handles[b]
        if all(pair) and nvml.nvmlDeviceGetP2PStatus(*pair, 2, ctypes.byref(link)) == 0:
            nvlink = link.value == 0
        found["pairs"].append({"from": a, "to": b, "peer_access": bool(peer.value), "nvlink": nvlink})
out()
"""

NVSHMEM = """
import ctypes, glob, json, os
from epcy import backends
backends.load_nvshmem()
with open("/proc/self/maps") as maps:
    paths = sorted({line.split()[-1] for line in maps if "libnvshmem_host.so" in line})
if not paths:
    print(json.dumps({"error": "libnvshmem_host.so.3 was not found"}))
    raise SystemExit
numbers = [ctypes.c_int() for _ in range(3)]
ctypes.CDLL(paths[0]).nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
names = glob.glob(os.path.join(os.path.dirname(paths[0]), "nvshmem_transport_*.so*"))
transports = sorted({os.path.basename(name)[len("nvshmem_transport_"):].split(".")[0] for name in names})
print(json.dumps({"version": [n.value for n in numbers], "path": paths[0], "transports": transports}))
"""
