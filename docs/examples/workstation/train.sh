#!/bin/sh
# Each GPU of CUDA_VISIBLE_DEVICES is this command's alone. CUDA counts them from 0.
echo "pid $$ has GPUs $CUDA_VISIBLE_DEVICES"
