// NVRTC, which torch loads by name to compile a few kernels from source. They compile to empty kernels.
#include <nvrtc.h>
#include <string.h>

nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram *program, const char *text, const char *name, int count,
                               const char *const *headers, const char *const *includes) {
    return *program = (nvrtcProgram) "ghost", NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *name, const char **lowered) {
    return *lowered = "nvrtc", NVRTC_SUCCESS;
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *name) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes) { return *bytes = 16, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes) { return *bytes = 16, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *text) { return memset(text, 0, 16), NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *image) { return memset(image, 0, 16), NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *words) { return *words = 0, NVRTC_SUCCESS; }
const char *nvrtcGetErrorString(nvrtcResult error) { return "an error of the ghost's NVRTC"; }
