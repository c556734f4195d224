// Device memory is address space whose pages exist only where something was copied to. Its size is counted.
#define _GNU_SOURCE
#include "ghost.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used; // bytes of this process on its device

void ghost_log(const char *format, ...) {
    static FILE *file;
    static pid_t owner; // a fork writes a file of its own
    const char *path = getenv("GHOST_LOG");
    if (!path) return;
    pthread_mutex_lock(&lock);
    if (owner != getpid()) {
        char name[4096];
        snprintf(name, sizeof name, "%s.%d", path, owner = getpid());
        if ((file = fopen(name, "w"))) setvbuf(file, NULL, _IOLBF, 1 << 16); // complete even if the process is killed
    }
    if (file) {
        va_list words;
        va_start(words, format);
        vfprintf(file, format, words);
        fputc('\n', file);
        va_end(words);
    }
    pthread_mutex_unlock(&lock);
}

// Programs can call ctypes.CDLL("libcuda.so.1").ghost_mark(b"step 3") to write the line "mark step 3" to the log.
void ghost_mark(const char *words) { ghost_log("mark %s", words); }

static size_t capacity(void) {
    const char *gib = getenv("GHOST_GIB");
    return (size_t)((gib ? atof(gib) : 79.1) * (1ul << 30));
}

// A range of addresses that CUDA has allocated.
typedef struct {
    char *start;
    size_t bytes;
    enum ghost_place place;
} Range;
static Range *ranges;
static size_t num_ranges, most_ranges;

static void *map(size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static void add(void *start, size_t bytes, enum ghost_place place) {
    pthread_mutex_lock(&lock);
    if (num_ranges == most_ranges) ranges = realloc(ranges, (most_ranges = 2 * most_ranges + 64) * sizeof(Range));
    ranges[num_ranges++] = (Range){start, bytes, place};
    pthread_mutex_unlock(&lock);
}

static size_t drop(const void *start) { // returns its bytes
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_ranges && !bytes; i++)
        if (ranges[i].start == start) {
            bytes = ranges[i].bytes;
            ranges[i] = ranges[--num_ranges];
        }
    pthread_mutex_unlock(&lock);
    return bytes;
}

enum ghost_place ghost_place(const void *pointer) {
    enum ghost_place place = PAGEABLE;
    const char *at = pointer;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_ranges && place == PAGEABLE; i++)
        if (at >= ranges[i].start && at < ranges[i].start + ranges[i].bytes) place = ranges[i].place;
    pthread_mutex_unlock(&lock);
    return place;
}

static int take(size_t bytes, const char *who) { // whether the device has so much left
    pthread_mutex_lock(&lock);
    int fits = used + bytes <= capacity();
    if (fits) used += bytes;
    pthread_mutex_unlock(&lock);
    if (!fits) ghost_log("full %s %zu", who, bytes);
    return fits;
}

static void give(size_t bytes) {
    pthread_mutex_lock(&lock);
    used -= bytes;
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    if (!take(bytes, "cudaMalloc") || !(*pointer = map(bytes))) return cudaErrorMemoryAllocation;
    add(*pointer, bytes, DEVICE);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    size_t bytes = pointer ? drop(pointer) : 0;
    if (bytes) munmap(pointer, bytes);
    give(bytes);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    *total = capacity();
    *unused = *total - used;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    ghost_log("pinned %zu", bytes);
    if (!(*pointer = map(bytes))) return cudaErrorMemoryAllocation;
    add(*pointer, bytes, PINNED);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    size_t bytes = drop(pointer);
    if (bytes) munmap(pointer, bytes);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    ghost_log("pinned %zu", bytes);
    add(pointer, bytes, PINNED);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) { return drop(pointer), cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost};
    enum ghost_place place = ghost_place(pointer);
    *found = (struct cudaPointerAttributes){.type = types[place], .device = ghost_device};
    found->devicePointer = place == PAGEABLE ? NULL : (void *)pointer;
    found->hostPointer = place == PINNED ? (void *)pointer : NULL;
    return cudaSuccess;
}

// Virtual memory of the driver, which torch uses for expandable segments. A handle is the size in bytes.
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    return *bytes = 2 << 20, CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    if (!(*pointer = (CUdeviceptr)map(bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
    add((void *)*pointer, bytes, DEVICE);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    drop((void *)pointer);
    munmap((void *)pointer, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    *handle = bytes;
    return take(bytes, "cuMemCreate") ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return give(handle), CUDA_SUCCESS; }

CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    madvise((void *)pointer, bytes, MADV_DONTNEED); // its values are gone, and so is the host's memory
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    return CUDA_SUCCESS;
}

// Copies
void ghost_move(void *to, const void *from, size_t bytes) {
    if (to != from && bytes <= GHOST_SMALL) memmove(to, from, bytes);
}

static void copy(void *to, const void *from, size_t bytes, int waits) {
    static const char *words[] = {"pageable", "device", "pinned"};
    enum ghost_place source = ghost_place(from), target = ghost_place(to);
    ghost_log("copy %s %s %zu", words[source], words[target], bytes);
    if (source == DEVICE && target == DEVICE) return ghost_move(to, from, bytes);
    memmove(to, from, bytes);
    // Copies between the GPU and pageable memory block the caller.
    if (waits || (source == DEVICE && target == PAGEABLE)) ghost_log("wait copy");
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return copy(to, from, bytes, 1), cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, 0), cudaSuccess;
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    ghost_launch("memset", "");
    if (bytes <= GHOST_SMALL) memset(pointer, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(pointer, value, bytes);
}
