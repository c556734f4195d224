// The CUDA runtime: devices, streams, events, graphs, and launches of the kernels in the torch libraries.
#define _GNU_SOURCE
#include "ghost.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__thread int ghost_device;

// Devices
static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

cudaError_t cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible && !*visible ? 0 : atoi(setting("GHOST_GPUS", "1"));
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device) { return *device = ghost_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return ghost_device = device, cudaSuccess; }

int ghost_attribute(int attribute) { // what an H100 SXM says
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
    case cudaDevAttrTotalConstantMemory:
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 64 << 10;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case 102: // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, which the runtime does not name
    case cudaDevAttrClusterLaunch: return 1;
    default: return 0;
    }
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    size_t unused;
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", setting("GHOST_NAME", "NVIDIA H100 80GB HBM3"));
    cudaMemGetInfo(&unused, &found->totalGlobalMem);
    memcpy(found->uuid.bytes, &(uint64_t[]){0x74736f6867, (uint64_t)device}, 16);
    found->pciBusID = device;
    found->major = ghost_attribute(cudaDevAttrComputeCapabilityMajor);
    found->multiProcessorCount = ghost_attribute(cudaDevAttrMultiProcessorCount);
    found->l2CacheSize = ghost_attribute(cudaDevAttrL2CacheSize);
    found->memoryBusWidth = ghost_attribute(cudaDevAttrGlobalMemoryBusWidth);
    found->warpSize = ghost_attribute(cudaDevAttrWarpSize);
    found->maxThreadsPerBlock = ghost_attribute(cudaDevAttrMaxThreadsPerBlock);
    found->maxThreadsPerMultiProcessor = ghost_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    found->maxBlocksPerMultiProcessor = ghost_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    found->sharedMemPerBlock = ghost_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    found->sharedMemPerBlockOptin = ghost_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found->sharedMemPerMultiprocessor = ghost_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    found->reservedSharedMemPerBlock = ghost_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    found->regsPerBlock = ghost_attribute(cudaDevAttrMaxRegistersPerBlock);
    found->regsPerMultiprocessor = ghost_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    found->totalConstMem = ghost_attribute(cudaDevAttrTotalConstantMemory);
    found->asyncEngineCount = ghost_attribute(cudaDevAttrAsyncEngineCount);
    for (int i = 0; i < 3; i++) {
        found->maxThreadsDim[i] = ghost_attribute(cudaDevAttrMaxBlockDimX + i);
        found->maxGridSize[i] = ghost_attribute(cudaDevAttrMaxGridDimX + i);
    }
    found->unifiedAddressing = found->concurrentKernels = found->cooperativeLaunch = found->clusterLaunch = 1;
    found->memoryPoolsSupported = found->streamPrioritiesSupported = found->canMapHostMemory = 1;
    found->textureAlignment = 512;
    found->memPitch = 2147483647;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return *value = ghost_attribute(attribute), cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *words, int length, int device) {
    snprintf(words, length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    default: return "an error of the ghost";
    }
}

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

// Streams, events and graphs. All work completes immediately, so waits are only logged.
struct CUstream_st {
    int priority, captures; // the number of its capture, or 0
};
struct CUgraph_st {
    size_t nodes;
};
static int num_captures, capturing;
static size_t captured_nodes;

void ghost_launch(const char *kind, const char *name) {
    if (capturing) captured_nodes++;
    ghost_log("%s%s %s", capturing ? "captured " : "", kind, name);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = calloc(1, sizeof **stream);
    (*stream)->priority = priority;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream ? stream->priority : 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    stream->captures = ++num_captures;
    capturing = 1, captured_nodes = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    int captures = stream ? stream->captures : 0;
    *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = captures;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamGetCaptureInfo(stream, status, NULL, NULL, NULL, NULL, NULL);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = malloc(sizeof **graph);
    (*graph)->nodes = captured_nodes;
    stream->captures = capturing = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return *count = graph->nodes, cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *runnable, cudaGraph_t graph, unsigned long long flags) {
    *runnable = memcpy(malloc(sizeof *graph), graph, sizeof *graph);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    ghost_log("graph %zu", ((cudaGraph_t)graph)->nodes);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return free(graph), cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = malloc(1), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return *milliseconds = 1.0f, cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) { return ghost_log("wait device"), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return ghost_log("wait stream"), cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return ghost_log("wait event"), cudaSuccess; }

// Kernels. A library registers each kernel with the address of the host function that launches it.
typedef struct {
    const void *function;
    const char *name;
} Kernel;
static Kernel *kernels; // sorted at the first launch after a registration
static size_t num_kernels, most_kernels;
static int sorted;

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }

void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name, int limit,
                            void *a, void *b, void *c, void *d, int *e) {
    if (num_kernels == most_kernels) {
        most_kernels = 2 * most_kernels + (1 << 16);
        kernels = realloc(kernels, most_kernels * sizeof(Kernel));
    }
    kernels[num_kernels++] = (Kernel){function, name};
    sorted = 0;
}

static int by_function(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((Kernel *)a)->function, y = (uintptr_t)((Kernel *)b)->function;
    return (x > y) - (x < y);
}

static const char *name_of(const void *function) {
    if (!sorted) qsort(kernels, num_kernels, sizeof(Kernel), by_function), sorted = 1;
    Kernel *found = bsearch(&(Kernel){function}, kernels, num_kernels, sizeof(Kernel), by_function);
    return found ? found->name : "?";
}

// Compute a few kernels of torch on small tensors, because programs read their results: zeros, ones and full, sums of
// integers, conversions, a stack of scalars, and the logic of booleans. Comparisons do not look at values: `==`, `!=` and
// `all()` are true, `<` and `>` are false. So torch.equal and isfinite are true, no value is above a limit, and guards
// pass on all ranks alike. nonzero() finds nothing. Each argument is the address of a parameter of the kernel.
static size_t size_of(const char *type) { // of a template's argument in a mangled name
    if (!strncmp(type, "N3c108BFloat16E", 15) || !strncmp(type, "N3c104HalfE", 11)) return 2;
    return strchr("bah", *type) ? 1 : *type == 's' ? 2 : strchr("fi", *type) ? 4 : strchr("dl", *type) ? 8 : 0;
}

static const char *after(const char *text, const char *start) { // what follows `start`, or NULL
    size_t length = strlen(start);
    return strncmp(text, start, length) ? NULL : text + length;
}

enum { INT32 = 3, INT64 = 4, FLOAT32 = 6, FLOAT64 = 7, BOOL = 11 }; // numbers of types in torch

static void convert(char *to, int to_type, const char *from, int from_type, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        double x = from_type == INT32     ? ((int32_t *)from)[i]
                   : from_type == INT64   ? ((int64_t *)from)[i]
                   : from_type == FLOAT32 ? ((float *)from)[i]
                   : from_type == BOOL    ? from[i] != 0
                                          : ((double *)from)[i];
        if (to_type == INT32) ((int32_t *)to)[i] = x;
        if (to_type == INT64) ((int64_t *)to)[i] = x;
        if (to_type == FLOAT32) ((float *)to)[i] = x;
        if (to_type == FLOAT64) ((double *)to)[i] = x;
    }
}

static int is_number(int type) { return type == INT32 || type == INT64 || type == FLOAT32 || type == FLOAT64; }

static void compute(const char *name, dim3 grid, void **arguments) {
    const char *rest;
    if ((rest = after(name, "_ZN2at6native29vectorized_elementwise_kernelILi"))) { // count, functor, tensors
        rest = strstr(rest, "E");
        int64_t count = *(int *)arguments[0], *numbers = arguments[1], **x = arguments[2];
        if (!rest || count < 1 || count * 8 > (int64_t)GHOST_SMALL || ghost_place(x[0]) != DEVICE) return;
        const char *type = after(rest, "ENS0_11FillFunctorI");
        for (int64_t i = 0, size = type ? size_of(type) : 0; i < count && size; i++)
            memcpy((char *)x[0] + i * size, numbers, size);
        if (after(rest, "ENS0_15CUDAFunctor_addIlE")) // a + alpha * b
            for (int64_t i = 0; i < count; i++) x[0][i] = x[1][i] + numbers[0] * x[2][i];
        if (after(rest, "ENS0_21CUDAFunctorOnSelf_addIlE")) // a + alpha * number
            for (int64_t i = 0; i < count; i++) x[0][i] = x[1][i] + numbers[0] * numbers[1];
        char *to = (char *)x[0], *a = (char *)x[1], *b = (char *)x[2];
        if (strstr(rest, "16CompareEqFunctor")) memset(to, 1, count);
        if (strstr(rest, "14CompareFunctor")) memset(to, 0, count);
        if (after(rest, "ENS0_13BinaryFunctorIbbbNS0_15binary_internal10MulFunctorIbEE"))
            for (int64_t i = 0; i < count; i++) to[i] = a[i] && b[i];
        if (after(rest, "EZNS0_23bitwise_not_kernel_cuda") && strstr(rest, "EUlbE_"))
            for (int64_t i = 0; i < count; i++) to[i] = !a[i];
    } else if (after(name, "_ZN2at6native27unrolled_elementwise_kernelIZZZNS0_23direct_copy_kernel_cuda") &&
               strstr(name, "LoadWithCastILi1E")) { // count, functor, tensors, two calculators, types
        int64_t count = *(int *)arguments[0];
        char **x = arguments[2];
        int from = *(int8_t *)arguments[5], to = *(int8_t *)arguments[6];
        if (count * 8 <= (int64_t)GHOST_SMALL && (is_number(from) || from == BOOL) && is_number(to))
            convert(x[0], to, x[1], from, count);
    } else if (strstr(name, "CatArrayBatchedCopy_") && (rest = strstr(name, "_contigINS1_10OpaqueTypeILj")) &&
               strstr(rest, "EEEjLi1ELi128ELi1E")) {
        size_t size = atoi(strstr(rest, "ILj") + 3); // bytes of an element
        struct { // as torch has it: pointers, offsets, sizes and numbers of elements
            const void *from[128];
            unsigned offset[128], size[128], count[128];
        } *tensors = arguments[1];
        for (unsigned i = 0; i < grid.y; i++)
            ghost_move(*(char **)arguments[0] + size * tensors->offset[i], tensors->from[i], size * tensors->count[i]);
    } else if (after(name, "_ZN2at6native13reduce_kernelI") &&
               (strstr(name, "15and_kernel_cuda") || strstr(name, "13MaxNanFunctorIlE") ||
                strstr(name, "11sum_functorIlllE"))) {
        // One struct. Look in it for a source, a target, no second target, no accumulator, two buffers, base 0.
        // The maximum of integers is the first one, because torch only reduces numbers that all ranks share.
        int64_t count = ((int *)arguments[0])[5], results = ((int *)arguments[0])[6]; // of a sum
        for (char **word = arguments[0], **end = word + 400; word < end; word++)
            if (ghost_place(word[0]) == DEVICE && ghost_place(word[1]) == DEVICE && !word[2] && !word[3] && !word[6]) {
                if (strstr(name, "15and_kernel_cuda"))
                    *word[1] = 1;
                else
                    *(int64_t *)word[1] = *(int64_t *)word[0];
                if (strstr(name, "11sum_functorIlllE") && results == 1 && count * 8 <= (int64_t)GHOST_SMALL)
                    for (int64_t i = 1; i < count; i++) *(int64_t *)word[1] += ((int64_t *)word[0])[i];
                break;
            }
    } else if (strstr(name, "28DeviceReduceSingleTileKernel") && strstr(name, "9NonZeroOp")) { // source, target
        // nonzero() returns no results. Without this, their number would be the integer that was there before.
        **(int32_t **)arguments[1] = 0;
    }
}

static cudaError_t launch(const void *function, dim3 grid, void **arguments) {
    const char *name = name_of(function);
    ghost_launch("kernel", name);
    compute(name, grid, arguments);
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, cudaSuccess; }

static __thread dim3 pushed[2]; // grid and block of the launch that is being written down
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    return pushed[0] = grid, pushed[1] = block, 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed[0], *block = pushed[1], *shared = 0, *(void **)stream = NULL;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return launch(kernel, grid, arguments);
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch(kernel, grid, arguments);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch(kernel, grid, arguments);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return launch(kernel, config->gridDim, arguments);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90};
    found->ptxVersion = 90;
    found->maxDynamicSharedSizeBytes = ghost_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block, size_t shared) {
    return *count = 2, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block,
                                                                   size_t shared, unsigned flags) {
    return *count = 2, cudaSuccess;
}

// Look up a function of the driver by name. Unknown functions succeed without any effect.
static int nothing(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) ghost_log("stub %s", name), *function = nothing;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
