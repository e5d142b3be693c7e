#!/bin/bash
# torchrun on this machine; --nproc-per-node=gpu for one rank per GPU.    bash examples/torchrun.sh [key=value ...]
# Ctrl-C or SIGTERM stops it without losing a step; run this again to continue. After the death of a rank, torchrun
# restarts all ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90
exec torchrun --standalone --nproc-per-node=2 --max-restarts=3 -m laststep --name first "$@"
