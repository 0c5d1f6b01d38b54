// The host parameters of FlashInfer's CUTLASS NVFP4 GEMM for SM12x, as its own code makes them.
//
//     program SCHEDULER SWAP D A B SFA SFB ALPHA WORKSPACE M N K MULTIPROCESSORS
//
// Prints the launch as JSON: addresses are numbers, and no GPU is needed.

#include "flashinfer/gemm/fp4_gemm_cutlass_template_sm120.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPANDED(macro, ...) macro(__VA_ARGS__)
#define NAMED(m, n, k, end) Fp4Gemm___nv_bfloat16_##m##_##n##_##k##end

namespace flashinfer {
namespace gemm {
EXPANDED(INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER, __nv_bfloat16, TILE_M, TILE_N, TILE_K, 1, 1, 1, _1SM, true)
EXPANDED(INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER, __nv_bfloat16, TILE_M, TILE_N, TILE_K, 1, 1, 1, _1SM, false)
}  // namespace gemm
}  // namespace flashinfer

// The driver is not here: what the executor reads of a tensor map (builder/ptx/memory.py).
extern "C" CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  int code = type == CU_TENSOR_MAP_DATA_TYPE_UINT16         ? 1
             : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16     ? 10
             : type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B ? 11
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

extern "C" CUresult cuTensorMapEncodeIm2col(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
    const int*, const int*, cuuint32_t, cuuint32_t, const cuuint32_t*, CUtensorMapInterleave,
    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_ERROR_INVALID_VALUE;
}

template <typename Gemm>
int write_launch(bool swap, char** words) {
  using Kernel = typename Gemm::GemmKernel;
  auto at = [&](int n) { return (void*)strtoull(words[n], nullptr, 0); };
  int m = atoi(words[10]), n = atoi(words[11]), k = atoi(words[12]);
  auto given = swap ? flashinfer::gemm::prepareGemmArgsImpl<Gemm>(
                          at(3), at(5), at(4), at(7), at(6), (const float*)at(8), n, m, k, 1)
                    : flashinfer::gemm::prepareGemmArgsImpl<Gemm>(
                          at(3), at(4), at(5), at(6), at(7), (const float*)at(8), m, n, k, 1);
  given.hw_info.sm_count = atoi(words[13]);  // else CUTLASS asks the GPU
  if (Gemm::can_implement(given) != cutlass::Status::kSuccess) return 1;
  alignas(128) char raw[sizeof(typename Kernel::Params)] = {};
  auto& params = *new (raw) typename Kernel::Params(Kernel::to_underlying_arguments(given, at(9)));
  dim3 grid = Gemm::get_grid_shape(params), block = Kernel::get_block_shape();
  cudaFuncAttributes unused;
  (void)cudaFuncGetAttributes(&unused, cutlass::device_kernel<Kernel>);  // so that nvcc makes it
  printf("{\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %d, ", grid.x, grid.y,
         grid.z, block.x, block.y, block.z, (int)Kernel::SharedStorageSize);
  printf("\"workspace\": %zu, \"parameters\": \"", (size_t)Gemm::get_workspace_size(given));
  for (char byte : raw) printf("%02x", (unsigned char)byte);
  return puts("\"}") < 0;
}

int main(int, char** words) {
  using namespace flashinfer::gemm;
  bool swap = !strcmp(words[2], "swapped");
  if (!strcmp(words[1], "streamk"))
    return swap ? write_launch<EXPANDED(NAMED, TILE_M, TILE_N, TILE_K, true_StreamK)>(swap, words)
                : write_launch<EXPANDED(NAMED, TILE_M, TILE_N, TILE_K, false_StreamK)>(swap, words);
  return swap ? write_launch<EXPANDED(NAMED, TILE_M, TILE_N, TILE_K, true)>(swap, words)
              : write_launch<EXPANDED(NAMED, TILE_M, TILE_N, TILE_K, false)>(swap, words);
}
