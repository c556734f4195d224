// CUDA, cuBLAS, cuDNN and NCCL as torch calls them. Each function reports to the detector and calls the function of the
// ghost GPU with the same name, which is in the next library.
#include "race.h"
struct __half { short bits; }; // instead of headers that the wheels lack
struct __nv_bfloat16 { short bits; };
#include <cstdio>
#include <cstring>
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <nccl.h>
#include <string>

#define GHOST(NAME) ([] { static auto found = (decltype(&NAME))dlsym(RTLD_NEXT, #NAME); return found; }())

extern "C" {

// The ghost GPU reports all matmuls and cuDNN plans here.
void ghost_launch(const char *kind, const char *name) {
    GHOST(ghost_launch)(kind, name);
    if (!strcmp(kind, "matmul") || !strcmp(kind, "cudnn")) race_library_kernel(name);
}

// Kernels of torch
static thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}

static std::map<const void *, const char *> &kernel_names() {
    static auto *names = new std::map<const void *, const char *>; // never destroyed, because libraries unload late
    return *names;
}

void __cudaRegisterFunction(void **binary, const char *function, char *device, const char *name, int limit, void *a,
                            void *b, void *c, void *d, int *e) {
    kernel_names()[function] = name;
    GHOST(__cudaRegisterFunction)(binary, function, device, name, limit, a, b, c, d, e);
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    auto name = kernel_names().find(kernel);
    race_kernel(stream, name == kernel_names().end() ? "?" : name->second);
    typedef cudaError_t Launch(const void *, dim3, dim3, void **, size_t, cudaStream_t); // overloaded by the header
    static auto *launch = (Launch *)dlsym(RTLD_NEXT, "cudaLaunchKernel");
    return launch(kernel, grid, block, arguments, shared, stream);
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, (cudaStream_t)stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return cudaLaunchKernel(kernel, config->gridDim, config->blockDim, arguments, 0, config->stream);
}

// Kernels of the compiler. Their image, an ELF file, contains the number of their parameters.
struct Function {
    std::string name;
    int num_parameters;
};
static std::mutex mutex;
static std::map<std::pair<void *, std::string>, int> num_parameters; // by module and name
static std::map<void *, Function> functions;

extern "C++" template <typename T> T load(const unsigned char *image, size_t offset) {
    T value;
    memcpy(&value, image + offset, sizeof value);
    return value;
}

static void read_image(void *module, const unsigned char *image) {
    if (memcmp(image, "\177ELF", 4)) return;
    auto table = load<uint64_t>(image, 40);
    auto header_size = load<uint16_t>(image, 58), num_sections = load<uint16_t>(image, 60);
    auto header = [&](int section) { return table + section * header_size; };
    auto names = load<uint64_t>(image, header(load<uint16_t>(image, 62)) + 24);
    for (int section = 0; section < num_sections; section++) {
        const char *name = (const char *)image + names + load<uint32_t>(image, header(section));
        if (strncmp(name, ".nv.info.", 9)) continue;
        auto at = load<uint64_t>(image, header(section) + 24), end = at + load<uint64_t>(image, header(section) + 32);
        int &count = num_parameters[{module, name + 9}];
        while (at + 4 <= end) { // an attribute has a format, a kind, and a value or the size of its value
            auto format = image[at], kind = image[at + 1];
            count += format == 4 && (kind == 0x17 || kind == 0x45); // KPARAM_INFO in two versions
            at += 4 + (format == 4 ? load<uint16_t>(image, at + 2) : 0);
        }
    }
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    GHOST(cuModuleLoadData)(module, image);
    std::lock_guard<std::mutex> lock(mutex);
    read_image(*module, (const unsigned char *)image);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    std::string image;
    char part[65536];
    FILE *file = fopen(path, "rb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    while (size_t size = fread(part, 1, sizeof part, file)) image.append(part, size);
    fclose(file);
    return cuModuleLoadData(module, image.c_str());
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    GHOST(cuModuleGetFunction)(function, module, name);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = num_parameters.find({module, name});
    functions[*function] = {name, found == num_parameters.end() ? -1 : found->second};
    return CUDA_SUCCESS;
}

static void report_launch(CUfunction function, CUstream stream, void **arguments) {
    std::unique_lock<std::mutex> lock(mutex);
    Function kernel = functions[function];
    lock.unlock();
    if (kernel.num_parameters < 0 || !arguments) return race_kernel(stream, kernel.name.c_str());
    int clock = race_work(stream);
    for (int i = 0; i < kernel.num_parameters; i++) {
        uintptr_t value; // a parameter of fewer bytes is no address on the device, whatever follows it
        memcpy(&value, arguments[i], sizeof value);
        if (ghost_place((void *)value) == 1) race_touch_allocation(clock, value, kernel.name.c_str());
    }
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    report_launch(function, stream, arguments);
    return GHOST(cuLaunchKernel)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments,
                                 extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    report_launch(function, config->hStream, arguments);
    return GHOST(cuLaunchKernelEx)(config, function, arguments, extra);
}

// Copies
static void report_copy(void *to, const void *from, size_t bytes, void *stream, bool waits) {
    int source = ghost_place(from), target = ghost_place(to), clock = race_work(stream);
    if (source) race_touch(clock, from, bytes, READ, "copy");
    if (target) race_touch(clock, to, bytes, WRITE, "copy");
    if (waits || (source == 1 && target == 0)) race_stream_wait(stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    report_copy(to, from, bytes, nullptr, true);
    return GHOST(cudaMemcpy)(to, from, bytes, kind);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    report_copy(to, from, bytes, stream, false);
    return GHOST(cudaMemcpyAsync)(to, from, bytes, kind, stream);
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    return cudaMemsetAsync(pointer, value, bytes, nullptr);
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    race_touch(race_work(stream), pointer, bytes, WRITE, "memset");
    return GHOST(cudaMemset)(pointer, value, bytes);
}

// Order
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    race_event_record(event, stream);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    race_event_record(event, stream);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    race_event_destroy(event);
    return GHOST(cudaEventDestroy)(event);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return race_event_query(event) ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return race_stream_query(stream) ? cudaSuccess : cudaErrorNotReady; }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    race_stream_wait_event(stream, event);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    race_event_wait(event);
    return GHOST(cudaEventSynchronize)(event);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    race_stream_wait(stream);
    return GHOST(cudaStreamSynchronize)(stream);
}

cudaError_t cudaDeviceSynchronize() {
    race_device_wait();
    return GHOST(cudaDeviceSynchronize)();
}

// cuBLAS and cuDNN. torch sets the stream of a handle before each use, in the thread that uses it.
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    race_library_stream(stream);
    return CUBLAS_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    race_library_stream(stream);
    return CUDNN_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t layout_a, const void *b,
                              cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
                              cublasLtMatrixLayout_t layout_c, void *d, cublasLtMatrixLayout_t layout_d,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes,
                              cudaStream_t stream) {
    race_library_stream(stream);
    if (workspace) race_touch(race_work(stream), workspace, bytes, WRITE, "workspace of cuBLASLt");
    return GHOST(cublasLtMatmul)(handle, description, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d,
                                 algorithm, workspace, bytes, stream);
}

// NCCL: a collective reads and writes in its stream.
static size_t bytes_of(size_t count, ncclDataType_t type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; // by number of ncclDataType_t
    return count * sizes[type];
}

static void report_collective(const char *name, const void *from, size_t read, void *to, size_t written, void *stream) {
    int clock = race_work(stream);
    race_touch(clock, from, read, READ, name);
    race_touch(clock, to, written, WRITE, name);
}

// In the arguments of COLLECTIVE, `size` is the bytes of `count` elements, and `all` those of all ranks.
#define COLLECTIVE(NAME, PARAMETERS, ARGUMENTS, FROM, READ_BYTES, TO, WRITTEN_BYTES)                                   \
    ncclResult_t NAME PARAMETERS {                                                                                     \
        size_t size = bytes_of(count, type), all = size;                                                               \
        int ranks = 1;                                                                                                 \
        ncclCommCount(group, &ranks), all *= ranks;                                                                    \
        report_collective(#NAME, FROM, READ_BYTES, TO, WRITTEN_BYTES, stream);                                         \
        return GHOST(NAME) ARGUMENTS;                                                                                  \
    }
COLLECTIVE(ncclAllReduce, (const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
            ncclComm_t group, cudaStream_t stream),
           (from, to, count, type, op, group, stream), from, size, to, size)
COLLECTIVE(ncclAllGather, (const void *from, void *to, size_t count, ncclDataType_t type,
            ncclComm_t group, cudaStream_t stream),
           (from, to, count, type, group, stream), from, size, to, all)
COLLECTIVE(ncclReduceScatter, (const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
            ncclComm_t group, cudaStream_t stream),
           (from, to, count, type, op, group, stream), from, all, to, size)
COLLECTIVE(ncclBroadcast, (const void *from, void *to, size_t count, ncclDataType_t type, int root,
            ncclComm_t group, cudaStream_t stream),
           (from, to, count, type, root, group, stream), from, size, to, size)
COLLECTIVE(ncclAlltoAll, (const void *from, void *to, size_t count, ncclDataType_t type,
            ncclComm_t group, cudaStream_t stream),
           (from, to, count, type, group, stream), from, all, to, all)
COLLECTIVE(ncclSend, (const void *from, size_t count, ncclDataType_t type, int peer,
            ncclComm_t group, cudaStream_t stream),
           (from, count, type, peer, group, stream), from, size, nullptr, 0)
COLLECTIVE(ncclRecv, (void *to, size_t count, ncclDataType_t type, int peer,
            ncclComm_t group, cudaStream_t stream),
           (to, count, type, peer, group, stream), nullptr, 0, to, size)
}
