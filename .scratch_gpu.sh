#!/bin/bash
# Run in the tree's root, built with CUDA: PY=python MPIEXEC=mpiexec. Under 90 s. GPUS: how many there are.
set -u
PY=${PY:-python}; MPIEXEC=${MPIEXEC:-mpiexec}
export PYTHONPATH=$PWD OPENBLAS_NUM_THREADS=1 EPCY_TIMEOUT=20
T="timeout -k 5"
step() { echo "=== $1 ($(date +%T))"; }
step "2 ranks, 2x1, correctness"
$T 35 $MPIEXEC -n 2 $PY -m pytest -q -x tests/mpi/test_nodes.py -k "nvshmem and not low_latency" -p no:cacheprovider 2>&1 | tail -15
step "2 ranks: dispatch and combine beside NVSHMEM's block put"
EPCY_NUM_MAX_NVL_PEERS=1 $T 30 $MPIEXEC -n 2 $PY -m epcy.bench dispatch combine -b 4096 -e 4096 -n 20 -w 3 \
  --hidden 7168 --topk 8 --experts 256 --backend nvshmem --mode ht 2>&1 | tail -15
step "4 ranks, 2x2 and 4x1"
$T 40 $MPIEXEC -n 4 $PY -m pytest -q -x tests/mpi/test_nodes.py -k "nvshmem and (test_exact or test_bytes or test_handles or test_worst) and not low_latency" -p no:cacheprovider 2>&1 | tail -15
step end
