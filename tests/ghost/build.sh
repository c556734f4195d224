#!/usr/bin/env bash
# Create .venv-ghost with the CUDA wheel of torch (4.7 GB), titanlite and its dependencies, the
# ghost GPU and its race detector, for scripts/ghost.sh. Requires gcc, g++, binutils, the Python
# headers, and a network or a folder of wheels for pip. If .venv-ghost exists, install missing
# packages and rebuild the ghost GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source=tests/ghost/device
venv=.venv-ghost
out=$venv/ghost
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
torch=2.14.1
if ! "$venv/bin/python" -c "import torch; assert torch.__version__.startswith('$torch')" 2>/dev/null
then
    "${pip[@]}" "torch==$torch"
fi
if ! "$venv/bin/python" -c 'import titanlite, hypothesis, pytest' 2>/dev/null; then
    "${pip[@]}" pytest hypothesis --editable .
fi

rm -rf "$out"
mkdir -p "$out/bin"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
nvidia=$site/nvidia
flags=(-O1 -fPIC -Wall -D__CUDA_FP16_H__ -D__CUDA_BF16_H__)
flags+=("-I$nvidia/cu13/include" "-I$nvidia/cudnn/include" "-I$nvidia/nccl/include")
# Contains headers that the CUDA runtime wheel lacks.
flags+=(-idirafter "$site/triton/backends/nvidia/include")
for part in memory runtime driver libraries; do
    gcc "${flags[@]}" -c -o "$out/$part.o" "$source/$part.c"
done
libraries="cublas|cudnn|cufft|curand|cusolver|cusparse"
# Other functions that the torch libraries and triton import become stubs, which succeed without any
# effect and log their first call.
{
    find "$site/torch/lib" -name '*.so*' -exec nm -D --undefined-only {} + 2>/dev/null |
        awk '{print $2}' | sed 's/@.*//'
    grep -ohE '\bcu[A-Z]\w+' "$site/triton/backends/nvidia/driver.c"
} | grep -E "^(__cuda|cu[A-Z]|cuda[A-Z]|$libraries|nccl|nvtx|nvshmem)" |
    grep -v '^cuFile' | sort -u >"$out/wanted"
nm "$out"/*.o | awk '$2 == "T" {print $3}' | sort >"$out/have"
{
    echo '#include "ghost.h"'
    comm -23 "$out/wanted" "$out/have" |
        sed 's/.*/long &(void) { static int said; if (!said++) ghost_log("stub &"); return 0; }/'
} >"$out/rest.c"
gcc "${flags[@]}" -I"$source" -fno-builtin -w -c -o "$out/rest.o" "$out/rest.c"
gcc -shared -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" "$out"/*.o -ldl -lpthread
# The race detector is another libcuda.so.1. Its functions call those of the ghost.
mkdir "$out/race"
gcc -shared -Wl,-soname,libghost.so -o "$out/race/libghost.so" "$out"/*.o -ldl -lpthread
gcc "${flags[@]}" -shared -Wl,-soname,libnvrtc.so.13 -Wl,--default-symver \
    -o "$out/libnvrtc.so.13" "$source/nvrtc.c"
# triton links its launchers against this name.
ln -s libcuda.so.1 "$out/libcuda.so"
ln -s libcuda.so.1 "$out/libnvidia-ml.so.1"
cp "$source/nvidia-smi" "$out/bin/"
source=tests/ghost/race
headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
race=(g++ -std=c++20 -O1 -fPIC -w -DNDEBUG -D__CUDA_FP8_H__ "${flags[@]}" -shared)
race+=("-I$headers" -I/usr/include/python3.11)
"${race[@]}" -Wl,-soname,libcuda.so.1 '-Wl,-rpath,$ORIGIN' -o "$out/race/libcuda.so.1" \
    "$source"/c{ore,uda}.cpp "$out/race/libghost.so" -ldl
"${race[@]}" "-I$site/torch/include" "-I$site/torch/include/torch/csrc/api/include" \
    "-L$site/torch/lib" "-Wl,-rpath,$site/torch/lib" -o "$out/race/libtorch_race.so" \
    "$source/torch.cpp" -ltorch -ltorch_cpu -lc10 -lc10_cuda
ln -s libcuda.so.1 "$out/race/libcuda.so"
ln -s libcuda.so.1 "$out/race/libnvidia-ml.so.1"
cp "$source/sitecustomize.py" "$out/race/"
rm "$out"/*.o "$out/rest.c" "$out/wanted" "$out/have"
scripts/ghost.sh python -c '
import torch
print(f"The ghost is an {torch.cuda.get_device_name()}, torch {torch.__version__}")'
