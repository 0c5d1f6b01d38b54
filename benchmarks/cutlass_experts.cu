// The launches of FlashInfer's CUTLASS experts for SM12x, as its own host code makes them: NVFP4, or
// with -DMX weights in MXFP4 and activations in MXFP8; results in bfloat16, or with -DHALF in half.
//
// Compiled in parts, as FlashInfer does: PART 0 is main, 1 the small kernels, 2 the choice of a
// tile, 3 the grouped GEMMs of one tile.
//
//     program INPUT TOKENS HIDDEN INTER EXPERTS TOP_K TILE SWAP FINALIZE ACTIVATION ADDRESS...
//
// cuda_host.cpp prints the launches, and says what standard input is.

#ifdef MX
#define ACT __nv_fp8_e4m3
#define SAFE_ACT SafeFP8
#define BLOCKS true
#else
#define ACT Fp4Type
#define SAFE_ACT SafeFP4
#define BLOCKS false
#endif
#ifdef HALF
#define OUT half
#define SAFE_OUT half
#else
#define OUT __nv_bfloat16
#define SAFE_OUT SafeBF16
#endif

#if PART == 1
#include "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"
#include "moe_kernels.h"
namespace tensorrt_llm::kernels::cutlass_kernels {
template class CutlassMoeFCRunner<ACT, Fp4Type, OUT>;
#ifndef MX
template class CutlassMoeFCRunner<Fp4Type, Fp4Type, OUT, OUT>;
#endif
}  // namespace tensorrt_llm::kernels::cutlass_kernels

#elif PART == 2
#include "moe_gemm/moe_gemm_template_dispatch.h"
namespace tensorrt_llm::kernels::cutlass_kernels_oss {
// For tiles that were not compiled; of the others, the linker takes PART 3, which it gets first.
template <typename ArchTag, typename T, typename WeightType, typename OutputType,
          typename EpilogueSchedule, typename EpilogueTag,
          TmaWarpSpecializedGroupedGemmInput::EpilogueFusion FUSION, typename TileShape,
          typename ClusterShape, bool IsMXFPX, bool DYNAMIC_CGA, bool BIAS, bool SwapAB>
__attribute__((noipa)) void tma_warp_specialized_generic_moe_gemm_kernelLauncher(
    TmaWarpSpecializedGroupedGemmInput, int, int const, cudaStream_t, int*, size_t*,
    cute::Shape<int32_t, int32_t, cute::_1>, cute::Shape<int32_t, int32_t, cute::_1>) {
  TLLM_THROW("this tile was not compiled");
}
}  // namespace tensorrt_llm::kernels::cutlass_kernels_oss
namespace tensorrt_llm::kernels::cutlass_kernels {
template class MoeGemmRunner<ACT, Fp4Type, OUT>;
}  // namespace tensorrt_llm::kernels::cutlass_kernels

#elif PART == 3
#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"
namespace tensorrt_llm {
namespace kernels {
namespace cutlass_kernels_oss {
#define EXPANDED(macro, ...) macro(__VA_ARGS__)
#define LAUNCHER(m, n, k, fusion, swap)                                                      \
  INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, SAFE_ACT, SafeFP4, SAFE_OUT, void,        \
                                            EpilogueOpDefault, fusion, m, n, k, 1, 1, 1, BLOCKS, \
                                            false, false, swap)
EXPANDED(LAUNCHER, TILE_M, TILE_N, TILE_K, NONE, false)
EXPANDED(LAUNCHER, TILE_M, TILE_N, TILE_K, NONE, true)
EXPANDED(LAUNCHER, TILE_M, TILE_N, TILE_K, FINALIZE, false)
EXPANDED(LAUNCHER, TILE_M, TILE_N, TILE_K, FINALIZE, true)
}  // namespace cutlass_kernels_oss
}  // namespace kernels
}  // namespace tensorrt_llm

#else
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cutlass/cutlass.h"
#include "moe_kernels.h"
#include "tensorrt_llm/common/memoryUtils.h"
#include "tensorrt_llm/kernels/preQuantScaleKernel.h"

// LoRA, which nobody asks for here, would need cuBLAS.
namespace tensorrt_llm::kernels {
int Lora_run(LoraImpl*, int64_t, int64_t, void const*, int const*, void const* const*, int,
             void* const*, void*, cudaStream_t) {
  exit(3);
}
#ifdef MX
// So would LoRA this copy, and AWQ this kernel.
template <>
void apply_per_channel_scale_kernel_launcher(ACT*, OUT const*, OUT const*, int, int, int64_t const*,
                                             cudaStream_t) {
  exit(3);
}
#endif
}  // namespace tensorrt_llm::kernels
namespace tensorrt_llm::common {
cudaError_t cudaMemcpyAsyncSanitized(void*, void const*, size_t, cudaMemcpyKind, cudaStream_t) {
  exit(3);
}
}  // namespace tensorrt_llm::common

using namespace tensorrt_llm::kernels::cutlass_kernels;
using tensorrt_llm::cutlass_extensions::CutlassGemmConfig;

// The tactic of a tile, which names its depth in bytes.
CutlassGemmConfig tactic(CutlassMoeFCRunnerInterface& runner, MoeGemmId gemm, char** words) {
  bool finalize = gemm == MoeGemmId::GEMM_2 && !strcmp(words[9], "finalize");
  for (auto const& one : runner.getTactics(gemm)) {
    auto tile = tensorrt_llm::cutlass_extensions::enum_to_shape_tuple(one.tile_config_sm120);
    char name[40];
    snprintf(name, sizeof name, "%dx%dx%d", (int)std::get<0>(tile), (int)std::get<1>(tile),
             (int)std::get<2>(tile));
    bool fused = one.epilogue_fusion_type == CutlassGemmConfig::EpilogueFusionType::FINALIZE;
    if (!strcmp(name, words[7]) && one.swap_ab == !strcmp(words[8], "swapped") && fused == finalize)
      return one;
  }
  fprintf(stderr, "no tactic has the tile %s\n", words[7]);
  exit(2);
}

template <typename Runner>
int make(char** words) {
  Runner runner;
  int tokens = atoi(words[2]), hidden = atoi(words[3]), inter = atoi(words[4]);
  int experts = atoi(words[5]), top_k = atoi(words[6]);
  auto at = [&](int n) { return (void*)strtoull(words[11 + n], nullptr, 0); };
  auto floats = [&](int n) { return (float const*)at(n); };
  runner.use_fused_finalize_ = true;
  runner.setTactic(tactic(runner, MoeGemmId::GEMM_1, words), tactic(runner, MoeGemmId::GEMM_2, words));
  ActivationParams activation((ActivationType)atoi(words[10]));
  MOEParallelismConfig alone(1, 0, 1, 0);
  printf("{\"workspace\": %zu}\n",
         runner.getWorkspaceSize(tokens, hidden, inter, experts, top_k, activation, alone, false,
                                 false, false, false, false));
#ifdef MX
  using Scale = TmaWarpSpecializedGroupedGemmInput::MXFPXElementSF;
  auto scales = QuantParams::MXFP8MXFP4((Scale const*)at(8), floats(9), (Scale const*)at(11), floats(12));
#else
  using Scale = TmaWarpSpecializedGroupedGemmInput::NVFP4ElementSF;
  auto scales = QuantParams::FP4(floats(7), (Scale const*)at(8), floats(9), floats(10),
                                 (Scale const*)at(11), floats(12));
#endif
  MoeMinLatencyParams unused{};
  tensorrt_llm::kernels::LoraParams none{};
  runner.runMoe(at(1), at(2), true, (int const*)at(3), floats(4), at(5), nullptr, activation, at(6),
                nullptr, scales, tokens, hidden, hidden, inter, experts, top_k, (char*)at(13), at(0),
                (int*)at(14), alone, false, false, none, false, false, false, unused, true, 0);
  return 0;
}

int main(int, char** words) {
#ifndef MX
  if (strcmp(words[1], "packed")) return make<CutlassMoeFCRunner<Fp4Type, Fp4Type, OUT, OUT>>(words);
#endif
  return make<CutlassMoeFCRunner<ACT, Fp4Type, OUT>>(words);
}
#endif
