#!/bin/bash
# One private run on four machines with eight GPUs each. `sbatch examples/slurm.sh RECIPE`, from a folder that all
# machines see. Set up once: python -m venv .venv && .venv/bin/pip install sfumato
#SBATCH --job-name=sfumato
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@180
#SBATCH --open-mode=append
set -eu
recipe=${1:?"name a recipe: sbatch examples/slurm.sh RECIPE"}
run=$PWD/runs/$SLURM_JOB_ID
mkdir -p "$PWD/runs"

# TERM comes three minutes before the time is over: a checkpoint that loses nothing. `scontrol requeue JOB` goes on.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec srun --kill-on-bad-exit=0 .venv/bin/torchrun \
    --nnodes "1:$SLURM_NNODES" --nproc-per-node 8 --max-restarts 100 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
    --rdzv-endpoint "$PWD/runs/.rendezvous-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-conf store_type=file,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=30 \
    -m sfumato train "$recipe" --output "$run" --resume --set training.precision=bf16
