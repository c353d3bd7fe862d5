# Waits until the process that started it, whose pipe is its input, has ended. Then it stops the daemon and its servers
# (which are its children), and removes its folder, which is the argument. It runs in the background of a shell that exits
# at once: when a worker ends, Ray kills its children, but not the children of its children.
exec 3<&0
(
    read -r _ <&3
    daemon=$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")
    echo quit -t 5 | timeout 20 nvidia-cuda-mps-control || { pkill -9 -P "$daemon"; kill -9 "$daemon"; }
    rm -rf "$1"
) >/dev/null 2>&1 &
