// cuBLAS, cuDNN and NCCL. Their functions log the work and its size, and compute nothing.
#include "ghost.h"
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cudnn.h>
#include <nccl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

// cuBLAS
static const char *type_name(cudaDataType_t type) {
    switch (type) {
    case CUDA_R_32F: return "float32";
    case CUDA_R_64F: return "float64";
    case CUDA_R_16F: return "float16";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_8F_E4M3: return "e4m3";
    case CUDA_R_8F_E5M2: return "e5m2";
    default: return "?";
    }
}

static cublasStatus_t matmul(int64_t m, int64_t n, int64_t k, int64_t count, cudaDataType_t a, cudaDataType_t b,
                             cudaDataType_t c) {
    char words[256];
    snprintf(words, sizeof words, "%ld x %ld x %ld x %ld, %s %s to %s", (long)count, (long)m, (long)n, (long)k,
             type_name(a), type_name(b), type_name(c));
    ghost_launch("matmul", words);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) { return *handle = calloc(1, 64), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    return *mode = CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    return *mode = CUBLAS_DEFAULT_MATH, CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType_t type_a, int lda, const void *b,
                            cudaDataType_t type_b, int ldb, const void *beta, void *c, cudaDataType_t type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return matmul(m, n, k, 1, type_a, type_b, type_c);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                          int n, int k, const void *alpha, const void *a, cudaDataType_t type_a,
                                          int lda, long long stride_a, const void *b, cudaDataType_t type_b, int ldb,
                                          long long stride_b, const void *beta, void *c, cudaDataType_t type_c, int ldc,
                                          long long stride_c, int count, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm) {
    return matmul(m, n, k, count, type_a, type_b, type_c);
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                              int k, const float *alpha, const float *a, int lda, const float *b, int ldb,
                              const float *beta, float *c, int ldc) {
    return matmul(m, n, k, 1, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                         int n, int k, const float *alpha, const float *a, int lda, long long stride_a,
                                         const float *b, int ldb, long long stride_b, const float *beta, float *c,
                                         int ldc, long long stride_c, int count) {
    return matmul(m, n, k, count, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F);
}

cublasStatus_t cublasDgemm_v2(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                              int k, const double *alpha, const double *a, int lda, const double *b, int ldb,
                              const double *beta, double *c, int ldc) {
    return matmul(m, n, k, 1, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F);
}

// cuBLASLt. A layout keeps its type and sides in the handle.
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
    *layout = calloc(1, sizeof **layout);
    memcpy((*layout)->data, &(uint64_t[]){type, rows, columns}, 3 * sizeof(uint64_t));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return free(layout), CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *description, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    return *description = calloc(1, sizeof **description), CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    return free(description), CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    return *preference = calloc(1, sizeof **preference), CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return free(preference), CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
    memset(results, 0, sizeof *results);
    return *found = 1, CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t layout_a, const void *b,
                              cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
                              cublasLtMatrixLayout_t layout_c, void *d, cublasLtMatrixLayout_t layout_d,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes,
                              cudaStream_t stream) {
    uint64_t *x = layout_a->data, *y = layout_d->data, m = y[1], n = y[2];
    return matmul(m, n, x[1] * x[2] / (m ? m : 1), 1, x[0], layout_b->data[0], y[0]);
}

// cuDNN. Every plan is reported as supported, even if cuDNN does not support the shape.
cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) { return *handle = malloc(1), CUDNN_STATUS_SUCCESS; }
size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    const int version[] = {CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL};
    return *value = version[type], CUDNN_STATUS_SUCCESS;
}

const char *cudnnGetErrorString(cudnnStatus_t status) { return "an error of the ghost's cuDNN"; }

void cudnnGetLastErrorString(char *words, size_t length) {
    if (length) *words = 0;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    return *stream = NULL, CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor) {
    return *descriptor = malloc(1), CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    return free(descriptor), CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *values) {
    int lists = name == CUDNN_ATTR_ENGINECFG_KNOB_CHOICES || name == CUDNN_ATTR_ENGINE_KNOB_INFO ||
                name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE || name == CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE;
    if (count) *count = lists ? 0 : 1;
    if (values && wanted && !lists && type == CUDNN_TYPE_INT64) *(int64_t *)values = 0;
    if (values && wanted && !lists && type == CUDNN_TYPE_INT32) *(int32_t *)values = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t variants) {
    return ghost_launch("cudnn", "plan"), CUDNN_STATUS_SUCCESS;
}

// NCCL. Small collectives return the result that they have if all ranks hold the same values as this rank.
struct ncclComm {
    int ranks, rank;
    uint64_t id;    // the same on all ranks
    unsigned *sent; // messages to each rank, then messages from each rank
};

static size_t bytes_of(size_t count, ncclDataType_t type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; // by number of ncclDataType_t
    return count * sizes[type];
}

static size_t collective(const char *name, size_t bytes, ncclComm_t group) {
    char words[128];
    snprintf(words, sizeof words, "%s %zu of %d", name, bytes, group->ranks);
    ghost_launch("nccl", words);
    return bytes;
}

static ncclResult_t join(ncclComm_t *group, int ranks, int rank, uint64_t id) {
    *group = malloc(sizeof **group);
    **group = (struct ncclComm){ranks, rank, id, calloc(2 * ranks, sizeof(unsigned))};
    return ncclSuccess;
}

static uint64_t number_of(ncclUniqueId id) {
    uint64_t number;
    return memcpy(&number, &id, sizeof number), number;
}

// Messages between processes are files. The receiver removes them.
static void message_path(char path[128], ncclComm_t group, int from, int to, unsigned number) {
    snprintf(path, 128, "/dev/shm/ghost-%016lx.%d.%d.%u", (long)group->id, from, to, number);
}

static ncclResult_t post(ncclComm_t group, int to, const void *values, size_t bytes) {
    char path[128], unfinished[160];
    message_path(path, group, group->rank, to, group->sent[to]++);
    snprintf(unfinished, sizeof unfinished, "%s.part", path);
    FILE *file = fopen(unfinished, "w");
    if (!file) return ncclSystemError;
    size_t written = fwrite(values, 1, bytes, file);
    return fclose(file) || written < bytes || rename(unfinished, path) ? ncclSystemError : ncclSuccess;
}

static ncclResult_t fetch(ncclComm_t group, int from, void *values, size_t bytes) {
    char path[128];
    message_path(path, group, from, group->rank, group->sent[group->ranks + from]++);
    FILE *file = NULL;
    for (int tries = 0; tries < 300000 && !(file = fopen(path, "r")); tries++) usleep(1000); // 5 minutes
    if (!file) return ncclRemoteError;
    size_t found = fread(values, 1, bytes, file);
    fclose(file), unlink(path);
    return found < bytes ? ncclRemoteError : ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t error) { return "an error of the ghost's NCCL"; }
const char *ncclGetLastError(ncclComm_t group) { return "an error of the ghost's NCCL"; }
ncclResult_t ncclCommCount(const ncclComm_t group, int *count) { return *count = group->ranks, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t group, int *rank) { return *rank = group->rank, ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t group, ncclResult_t *error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) { return (ncclResult_t)cudaMalloc(pointer, bytes); }
ncclResult_t ncclMemFree(void *pointer) { return (ncclResult_t)cudaFree(pointer); }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    return getrandom(id, sizeof(uint64_t), 0) < 0 ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *group, int ranks, ncclUniqueId id, int rank) {
    return join(group, ranks, rank, number_of(id));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *group, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return join(group, ranks, rank, number_of(id));
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *group, int ranks, int rank, int num_ids, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
    return join(group, ranks, rank, number_of(*ids));
}

ncclResult_t ncclCommSplit(ncclComm_t group, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
    // All ranks of the group take part, and those with the same color become a group, in the order of their keys.
    int own[] = {color, key}, ranks = 0, rank = 0;
    for (int to = 0; to < group->ranks; to++)
        if (post(group, to, own, sizeof own)) return ncclSystemError;
    for (int from = 0; from < group->ranks; from++) {
        int other[2];
        if (fetch(group, from, other, sizeof other)) return ncclRemoteError;
        ranks += other[0] == color;
        rank += other[0] == color && (other[1] < key || (other[1] == key && from < group->rank));
    }
    *part = NULL;
    uint64_t id = (group->id + group->sent[0]) * 0x9e3779b97f4a7c15 + color; // each split makes sent[0] another one
    return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : join(part, ranks, rank, id);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t group, cudaStream_t stream) {
    size_t bytes = collective("all_reduce", bytes_of(count, type), group);
    ghost_move(to, from, bytes);
    if (type == ncclInt64 && op == ncclSum && group->ranks && bytes <= GHOST_SMALL)
        for (size_t i = 0; i < count; i++) ((int64_t *)to)[i] *= group->ranks;
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t group,
                           cudaStream_t stream) {
    size_t bytes = collective("all_gather", bytes_of(count, type), group);
    for (int i = 0; i < group->ranks && bytes * group->ranks <= GHOST_SMALL; i++)
        ghost_move((char *)to + i * bytes, from, bytes);
    return ncclSuccess;
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t group, cudaStream_t stream) {
    size_t bytes = collective("reduce_scatter", bytes_of(count, type), group);
    ghost_move(to, (const char *)from + group->rank * bytes, bytes);
    return ncclSuccess;
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t group,
                           cudaStream_t stream) {
    ghost_move(to, from, collective("broadcast", bytes_of(count, type), group));
    return ncclSuccess;
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t group,
                          cudaStream_t stream) {
    ghost_move(to, from, collective("all_to_all", bytes_of(count, type) * group->ranks, group));
    return ncclSuccess;
}

// Only integers are transferred: objects and their sizes, which torch sends one at a time.
static int arrives(size_t count, ncclDataType_t type) { return type <= ncclUint64 && bytes_of(count, type) <= GHOST_SMALL; }

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t group,
                      cudaStream_t stream) {
    size_t bytes = collective("send", bytes_of(count, type), group);
    return arrives(count, type) ? post(group, peer, from, bytes) : ncclSuccess;
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t group, cudaStream_t stream) {
    size_t bytes = collective("recv", bytes_of(count, type), group);
    return arrives(count, type) ? fetch(group, peer, to, bytes) : ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t group) {
    return *op = ncclNumOps, ncclSuccess;
}
