// The CUDA runtime for host code that runs without a GPU: prints each launch instead.
//
// Standard input has the parameters' sizes of each kernel, a line for each: its name, then numbers.
// A launch is a line of JSON on standard output.  The device is a GB10.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> all;
  return all;
}

std::vector<Configuration>& configurations() {
  static std::vector<Configuration> all;
  return all;
}

const std::vector<size_t>& sizes_of(const std::string& kernel) {
  static std::map<std::string, std::vector<size_t>> all;
  for (std::string line, name; std::getline(std::cin, line);) {
    std::istringstream words(line);
    words >> name;
    for (size_t size; words >> size;) all[name].push_back(size);
  }
  return all[kernel];
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** values, size_t shared) {
  const std::string& name = names()[function];
  printf("{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %zu, ",
         name.c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
  printf("\"parameters\": [");
  size_t place = 0;
  for (size_t size : sizes_of(name)) {
    printf(place ? ", \"" : "\"");
    for (size_t n = 0; n < size; n++) printf("%02x", ((const unsigned char*)values[place])[n]);
    printf("\"");
    place++;
  }
  puts("]}");
  return cudaSuccess;
}

[[noreturn]] void missing(const char* what) {
  fprintf(stderr, "cuda_host.cpp: %s needs a device\n", what);
  exit(3);
}
}  // namespace

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                            void*, dim3*, dim3*, int*) {
  names()[function] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations().push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration one = configurations().back();
  configurations().pop_back();
  *grid = one.grid, *block = one.block, *shared = one.shared;
  *(cudaStream_t*)stream = one.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** values,
                               size_t shared, cudaStream_t) {
  return launch(kernel, grid, block, values, shared);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* given, const void* function,
                                void** values) {
  return launch(function, given->gridDim, given->blockDim, values, given->dynamicSmemBytes);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* processors = getenv("MULTIPROCESSORS");
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 12; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 1; break;
    case cudaDevAttrMultiProcessorCount: *value = processors ? atoi(processors) : 48; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 99 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 100 << 10; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1536; break;
    default: missing("this attribute of the device");
  }
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void*) {
  *found = {};
  found->type = cudaMemoryTypeDevice;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { missing("cudaEventSynchronize"); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { missing("cudaEventRecord"); }
cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) { missing("cudaMemcpy"); }
cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t) {
  printf("{\"address\": %zu, \"fill\": %d, \"bytes\": %zu}\n", (size_t)at, value, size);
  return cudaSuccess;
}

// What the executor reads of a tensor map (builder/ptx/memory.py).
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  int code = type == CU_TENSOR_MAP_DATA_TYPE_UINT8          ? 0
             : type == CU_TENSOR_MAP_DATA_TYPE_UINT16       ? 1
             : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16      ? 6
             : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16     ? 10
             : type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B ? 11
             : type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B ? 12
                                                             : -1;
  uint64_t at = (uint64_t)address;
  uint32_t word[32] = {(uint32_t)at, (uint32_t)(at >> 32),
                       2u | (rank - 1) << 4 | (uint32_t)code << 7 | (uint32_t)swizzle << 13};
  for (cuuint32_t n = 0; n < rank; n++) {
    if (code < 0 || steps[n] != 1) return CUDA_ERROR_INVALID_VALUE;
    if (n) {
      word[2 + n] = (uint32_t)(strides[n - 1] >> 4);
      word[7] |= (uint32_t)(strides[n - 1] >> 36 & 15) << 4 * (n - 1);
      word[14] |= (box[n] - 1) << 8 * (n - 1);
    }
    word[8 + n] = (uint32_t)dims[n] - 1;
  }
  word[13] = (box[0] - 1) << 24;
  memcpy(map, word, sizeof word);
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const int*, const int*,
                                 cuuint32_t, cuuint32_t, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill) {
  return CUDA_ERROR_INVALID_VALUE;
}
}
