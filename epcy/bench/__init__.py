"""Measure epcy beside what a user would write otherwise, and check every row of what it measures.

Run it as ``mpiexec -n R python -m mpi4py -m epcy.bench CASE...``; ``--help`` lists the options.

====================  =========================================================================
file                  what it holds
====================  =========================================================================
``__main__.py``       the run: one line of the table for each case and size
``arguments.py``      the command line
``workload.py``       tokens and routings, drawn from a seed for each rank
``cases.py``          what is timed: dispatch, combine, roundtrip, by epcy and by the baseline
``baseline.py``       the baseline: NumPy and ``MPI.Alltoallv``
``measure.py``        runs, the memcpy beside them, percentiles, bytes
``checking.py``       ``#wrong``: every row against ``epcy.reference``
``table.py``          the table and the JSON rows; ``plot.py`` draws them
``environment.py``    what ran: processor, versions, date, command
====================  =========================================================================
"""
