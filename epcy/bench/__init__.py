"""Measure epcy beside what a user would write otherwise, and check every row of what it measures.

Run it as ``mpiexec -n R python -m mpi4py -m epcy.bench CASE...``; ``--help`` lists the options.

=====================  ========================================================================
file                   what it holds
=====================  ========================================================================
``__main__.py``        the run: one line of the table for each case and size
``arguments.py``       the command line; ``suites.py`` the lines of ``--suite``
``workload.py``        sizes and routings, and the host's tokens, drawn from a seed for each rank
``measure.py``         runs, the memcpy beside them, percentiles, bytes
``table.py``           the table and the JSON rows; ``plot.py`` draws them
``environment.py``     what ran: processor, GPUs, versions, date, command
=====================  ========================================================================

High throughput on the host backend:

=====================  ========================================================================
``cases.py``           what is timed: dispatch, combine, roundtrip, by epcy and by the baseline
``baseline.py``        the baseline: NumPy and ``MPI.Alltoallv``
``checking.py``        ``#wrong``: every row against ``epcy.reference``
=====================  ========================================================================

The nvshmem backend, and low latency on both; importing these needs no GPU:

=====================  ========================================================================
``device_run.py``      the run: links first, then every line; ``device_table.py`` its table
``lines.py``           one line: its Buffer, data, works and clocks
``works.py``           what is timed and checked, one class a case
``calls.py``           the calls that works make, of high throughput and low latency
``clocks.py``          CUDA events, flush, alignment, graph replay; the host's timer
``datasets.py``        inputs of all ranks, and what this rank must get
``draws.py``           rows by a hash, drawn and compared where they lie
``links.py``           the copy engine and TMA between two GPUs
``nccl.py``            the bare NCCL exchange; ``cupy_baseline.py`` what a CuPy user would write
=====================  ========================================================================
"""
