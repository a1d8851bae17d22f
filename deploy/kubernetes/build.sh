#!/bin/sh
# Build an image in the root of the repository: sh deploy/kubernetes/build.sh KIND IMAGE
#
#   cpu          torch and Lightning on CPUs
#   cuda         torch and Lightning on GPUs, which reduce with NCCL
#   keras        Keras on CPUs, with Horovod
#   keras-cuda   Keras on GPUs, with Horovod and NCCL
set -eu
kind="$1" image="$2" folder=deploy/kubernetes
cuda_index=https://download.pytorch.org/whl/cu130

case "$kind" in
cpu)
    docker build --file $folder/Dockerfile --tag "$image" .
    ;;
cuda)
    docker build --file $folder/Dockerfile --tag "$image" --build-arg TORCH_INDEX=$cuda_index .
    ;;
keras)
    # Horovod is built beside torch, too.
    docker build --file $folder/Dockerfile --tag "$image-base" --build-arg EXTRAS=torch,keras,s3 .
    docker build --file $folder/Dockerfile.horovod --tag "$image" --build-arg IMAGE="$image-base" .
    ;;
keras-cuda)
    docker build --file $folder/Dockerfile --tag "$image-base" --build-arg EXTRAS=torch,keras,s3 \
        --build-arg TORCH_INDEX=$cuda_index .
    docker build --file $folder/Dockerfile.horovod --tag "$image" --build-arg IMAGE="$image-base" .
    ;;
*)
    echo "KIND is cpu, cuda, keras or keras-cuda, not $kind" >&2
    exit 2
    ;;
esac
docker push "$image"
