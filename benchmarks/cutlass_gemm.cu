// A launch of FlashInfer's CUTLASS NVFP4 GEMM for SM12x, as its own host code makes it.
//
//     program SCHEDULER SWAP D A B SFA SFB ALPHA WORKSPACE M N K
//
// cuda_host.cpp prints it, and says what standard input is.

#include "flashinfer/gemm/fp4_gemm_cutlass_template_sm120.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPANDED(macro, ...) macro(__VA_ARGS__)

namespace flashinfer {
namespace gemm {
EXPANDED(INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER, __nv_bfloat16, TILE_M, TILE_N, TILE_K, 1, 1, 1, _1SM, true)
EXPANDED(INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER, __nv_bfloat16, TILE_M, TILE_N, TILE_K, 1, 1, 1, _1SM, false)

template <bool SwapAB>
void launch(bool streamk, char** words) {
  using cute::Int;
  auto at = [&](int n) { return (void*)strtoull(words[n], nullptr, 0); };
  auto size = [&](int n) { return atoi(words[n]); };
  auto launcher =
      streamk ? genericFp4GemmKernelLauncherStreamK<__nv_bfloat16, Int<TILE_M>, Int<TILE_N>, Int<TILE_K>,
                                                    Int<1>, Int<1>, Int<1>, _1SM, SwapAB>
              : genericFp4GemmKernelLauncher<__nv_bfloat16, Int<TILE_M>, Int<TILE_N>, Int<TILE_K>,
                                             Int<1>, Int<1>, Int<1>, _1SM, SwapAB>;
  auto call = [&](void* d, void* a, void* b, size_t room) {
    return launcher(d, a, b, at(6), at(7), (float const*)at(8), size(10), size(11), size(12), 1,
                    CutlassGemmConfig(), (char*)at(9), room, 0, nullptr);
  };
  size_t room = call(nullptr, nullptr, nullptr, 0);
  printf("{\"workspace\": %zu}\n", room);
  call(at(3), at(4), at(5), room);
}
}  // namespace gemm
}  // namespace flashinfer

int main(int, char** words) {
  bool streamk = !strcmp(words[1], "streamk");
  strcmp(words[2], "swapped") ? flashinfer::gemm::launch<false>(streamk, words)
                              : flashinfer::gemm::launch<true>(streamk, words);
}
