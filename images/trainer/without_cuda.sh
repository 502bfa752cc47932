#!/bin/sh
# Make the torch that is installed, which was built for CUDA, one for CPUs alone.
# It is linked with libraries of 1.5 GB that a machine without a GPU never calls into, but that have
# to be there with their symbols when it starts: each becomes a shell in which every function traps.
set -eu
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pip uninstall --quiet --yes triton cuda-bindings cuda-pathfinder
cd "$site/nvidia"

# What is never loaded before a GPU is there: parts of cuDNN, device code, headers, tools.
find . -type d -name include -prune -exec rm -r {} +
find . -type f \( -name '*.a' -o -name '*.bc' -o -name 'libcudnn_*' -o -name 'libcusolver*' \
    -o -name 'libnvJitLink*' -o -name 'libnvperf*' -o -name 'libnvrtc-builtins*' \
    -o -name 'libnvblas*' -o -name 'libcufftw*' -o -name 'libcufile_rdma*' \
    -o -name 'nvshmem_bootstrap_*' -o -name 'nvshmem_transport_*' \) -delete

find . -name '*.so.*' -size +50M | while read -r library; do
    name=$(basename "$library")
    nm --dynamic --defined-only --with-symbol-versions "$library" |
        awk '$2 != "A" {print $3}' > /tmp/symbols
    sed 's/@.*//; s/.*/void &(void) { __builtin_trap(); }/' /tmp/symbols | sort -u > /tmp/shell.c
    echo "$(sed -n '/@@/{s/.*@@//p;q}' /tmp/symbols) { global: *; };" > /tmp/shell.map
    gcc -shared -nostdlib -w -Wl,-soname,"$name",--version-script=/tmp/shell.map -o "$library" /tmp/shell.c
done
python3 -c 'import torch, torchvision; torch.linalg.svd(torch.ones(2, 2))'
rm -r /tmp/*
