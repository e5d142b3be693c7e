#!/bin/bash
# torchrun on this machine; --nproc-per-node=gpu is a rank per GPU.    bash examples/torchrun.sh [key=value ...]
# Ctrl-C or SIGTERM stops it with every step kept, and the same again goes on; a rank that dies is started again.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90
exec torchrun --standalone --nproc-per-node=2 --max-restarts=3 -m trainer --name first "$@"
