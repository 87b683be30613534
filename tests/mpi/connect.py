"""Start NVSHMEM by the id that rank 0 made, as far as that goes without a GPU: test_unique_id.py runs this.

epcy itself stops before this where there is no GPU, so the host library is called past it.
"""

import ctypes
import os
import sys

from mpi4py import MPI

from epcy import backends
from epcy.backends import bootstrap

backends.load_nvshmem()

from epcy.backends import symmetric  # noqa: E402

INIT_WITH_UNIQUEID = 1 << 3


class IdArguments(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int),
        ("id", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
    ]


class Arguments(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("of_id", IdArguments), ("padding", ctypes.c_char * 96)]


class Attributes(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("arguments", Arguments)]


def versioned(structure):
    structure.version = (1 << 16) + ctypes.sizeof(structure)
    return structure


comm = MPI.COMM_WORLD
os.environ.update(symmetric.ENVIRONMENT)
given = bootstrap.allgather(comm, symmetric.unique_id() if comm.rank == 0 else None, 20, "test")[0]
unique_id = ctypes.create_string_buffer(given, len(given))
attributes = versioned(Attributes())
versioned(versioned(attributes.arguments).of_id)
host = ctypes.CDLL("libnvshmem_host.so.3")
at = ctypes.byref(attributes)
taken = host.nvshmemx_set_attr_uniqueid_args(comm.rank, comm.size, unique_id, at)
init = host.nvshmemx_hostlib_init_attr(INIT_WITH_UNIQUEID, at)
status = host.nvshmemx_init_status()
sys.stdout.write(f"rank {comm.rank}: arguments {taken}, init {init}, status {status}\n")
sys.stdout.flush()
comm.Barrier()  # rank 0 holds the id's socket until all have connected
os._exit(0)  # a library that started by half must not be asked to end
