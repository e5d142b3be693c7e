#!/bin/bash
# An interactive allocation, to try something out.    bash examples/salloc.sh [key=value ...]
# `python launch.py cancel first` stops it without losing a step (Ctrl-C at srun kills it); run this again to continue.
# It does not restart by itself: Slurm requeues only jobs submitted with sbatch.
cpus=4
options=(--nodes=2 --ntasks-per-node=1 --cpus-per-task=$cpus --signal=USR2@90)
# options+=(--gres=gpu:1 --constraint=a100 --mem=32G --time=08:00:00)

# module load cuda/12.4; source ~/venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus} SRUN_CPUS_PER_TASK=$cpus

salloc "${options[@]}" srun --kill-on-bad-exit=1 python -m laststep --name first "$@"
