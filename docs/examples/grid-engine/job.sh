#!/bin/sh
#$ -j y
#$ -l gpu=2
# Each GPU of CUDA_VISIBLE_DEVICES is this job's alone. CUDA counts them from 0.
echo "job $JOB_ID has GPUs $CUDA_VISIBLE_DEVICES of $(hostname)"
