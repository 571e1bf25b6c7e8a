// A libcuda of the host's memory for test_hardware_driver.py: enough of it to see that the calls of hardware/driver.py
// arrive as they are meant. Compiled against cuda.h, so that prototypes are checked too. A "module" is its PTX text; a
// launch of "scale" multiplies `n` floats; every other kernel fails.
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  float* x;
  int n;
  float factor;
} Scale;

static char text[1 << 16];
static float variable[4];
static int dynamic_shared = -1;

CUresult cuInit(unsigned int flags) {
  return flags ? CUDA_ERROR_INVALID_VALUE : getenv("NO_GPU") ? CUDA_ERROR_NO_DEVICE : 0;
}
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
          : error == CUDA_ERROR_INVALID_PTX   ? "CUDA_ERROR_INVALID_PTX"
          : error == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                              : "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** name) { return *name = "in words", error ? CUDA_SUCCESS : 1; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = 7, ordinal ? CUDA_ERROR_INVALID_DEVICE : 0; }
CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return strncpy(name, "a GPU of the host", length), device != 7;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 9
           : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
                                                                   : -1;
  return device != 7;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = (CUcontext)text, device != 7;
}
CUresult cuCtxSetCurrent(CUcontext context) { return context != (CUcontext)text; }
CUresult cuCtxSetLimit(CUlimit limit, size_t bytes) { return limit != CU_LIMIT_STACK_SIZE || bytes < 1024; }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count, CUjit_option* options,
                            void** values) {
  if (count != 2 || options[0] != CU_JIT_ERROR_LOG_BUFFER || options[1] != CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) return 1;
  if (strstr(image, "nonsense")) {
    strncpy(values[0], "ptxas error: nonsense", (size_t)values[1]);
    return CUDA_ERROR_INVALID_PTX;
  }
  return strncpy(text, image, sizeof text - 1), *module = (CUmodule)text, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return module != (CUmodule)text; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return *function = (CUfunction)(strcmp(name, "scale") ? NULL : variable), module != (CUmodule)text;
}
CUresult cuModuleGetGlobal(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  if (strcmp(name, "variable")) return CUDA_ERROR_NOT_FOUND;
  return *address = (CUdeviceptr)variable, *bytes = sizeof variable, module != (CUmodule)text;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  (void)function;
  return dynamic_shared = value, which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) { return *address = (CUdeviceptr)malloc(bytes), CUDA_SUCCESS; }
CUresult cuMemFree(CUdeviceptr address) { return free((void*)address), CUDA_SUCCESS; }
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return memcpy((void*)to, from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { return memcpy(to, (void*)from, bytes), CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                        unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void** parameters,
                        void** extra) {
  if (!function) return CUDA_ERROR_LAUNCH_FAILED;
  if (gx != 1 || gy != 2 || gz != 3 || bx != 4 || by != 5 || bz != 6 || (int)shared != dynamic_shared) return 1;
  if (stream || parameters || extra[0] != CU_LAUNCH_PARAM_BUFFER_POINTER || extra[2] != CU_LAUNCH_PARAM_BUFFER_SIZE ||
      extra[4] != CU_LAUNCH_PARAM_END || *(size_t*)extra[3] != sizeof(Scale))
    return 1;
  const Scale* given = extra[1];
  for (int i = 0; i < given->n; ++i) given->x[i] *= given->factor;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* size, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if ((size_t)map % 64 || interleave || promotion) return CUDA_ERROR_INVALID_VALUE;
  cuuint64_t* out = map->opaque;
  memset(map, 0, sizeof *map);
  out[0] = type, out[1] = rank, out[2] = (size_t)address, out[3] = size[rank - 1],
  out[4] = rank > 1 ? strides[rank - 2] : 0;
  out[5] = box[rank - 1], out[6] = steps[rank - 1], out[7] = swizzle, out[8] = fill;
  return CUDA_SUCCESS;
}
