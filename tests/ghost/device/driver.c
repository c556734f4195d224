// The parts of the CUDA driver that torch and triton call: one context, modules of triton and their launches.
#include "ghost.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define CONTEXT ((CUcontext)0x1000)

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return (CUresult)cudaGetDeviceCount(count); }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = ghost_device, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 1 << 20, CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return *value = ghost_attribute(attribute), CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **words) {
    return *words = "an error of the ghost's driver", CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (ghost_place((void *)pointer) == PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr *)value = attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? pointer : 0;
    return CUDA_SUCCESS;
}

// NVML, which the allocator of torch calls. It reports no NVLink fabric and no processes.
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return *device = (void *)bus, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDA_VERSION, 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 3; } // NVML_ERROR_NOT_SUPPORTED
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) { return *count = 0, 0; }

// NVIDIA tools such as CUPTI request tables of functions. The ghost has none, so profilers record no kernels.
CUresult cuGetExportTable(const void **table, const CUuuid *id) { return CUDA_ERROR_NOT_FOUND; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = malloc(1), CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *module, const char *path) { return *module = malloc(1), CUDA_SUCCESS; }

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { // a function is its name
    return *function = (CUfunction)strdup(name), CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    return ghost_launch("triton", (const char *)function), CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    return ghost_launch("triton", (const char *)function), CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    return *count = 16, CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block, size_t shared) {
    return *count = 2, CUDA_SUCCESS;
}
