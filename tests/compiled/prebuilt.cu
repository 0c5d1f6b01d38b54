// Kernels with the names and the telling instructions of those that vLLM ships, and nothing else.
// -DONLY_1200 compiles the FP8 kernel as sources before vLLM 0.22.0 guard it.

#if __CUDA_ARCH__ >= 1200 && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define HAS_FP4 1
#endif

template <class T> struct enable_sm120_only {};
struct MainloopSm120TmaWarpSpecializedBlockScaled {};
struct MainloopSm120ArrayTmaWarpSpecializedBlockScaled {};

__device__ void fp8_mma(float* out, const unsigned* in) {
  float c[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]));
  out[0] = c[0] + c[1] + c[2] + c[3];
}

__device__ void fp4_mma(float* out, const unsigned* in) {
#ifdef HAS_FP4
  float c[4] = {};
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col"
      ".f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3},{%10},{0,0},{%11},{0,0};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]), "r"(in[6]),
        "r"(in[7]));
  out[0] = c[0] + c[1] + c[2] + c[3];
#endif
}

__device__ void half_mma(float* out, const unsigned* in) {
  float c[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]));
  out[0] = c[0] + c[1] + c[2] + c[3];
}

namespace cutlass {
template <class T> struct Body {
  static __device__ void run(float* out, const unsigned* in) { fp4_mma(out, in); }
};
template <class T> struct Body<enable_sm120_only<T>> {
  static __device__ void run(float* out, const unsigned* in) {
#if defined(ONLY_1200) && __CUDA_ARCH__ != 1200
    asm volatile("trap;");
#else
    fp8_mma(out, in);
#endif
  }
};
template <class T> __global__ void device_kernel(float* out, const unsigned* in) {
  Body<T>::run(out, in);
}
}  // namespace cutlass

namespace vllm {
template <class T> __global__ void cvt_fp16_to_fp4(unsigned short* out, const float* in) {
#ifdef HAS_FP4
  unsigned short packed;
  asm volatile("{ .reg .b8 low; cvt.rn.satfinite.e2m1x2.f32 low, %1, %2; mov.b16 %0, {low, 0}; }"
               : "=h"(packed) : "f"(in[0]), "f"(in[1]));
  out[0] = packed;
#endif
}
}  // namespace vllm

namespace marlin {
template <long a, long b, long c, long s> __global__ void Marlin(float* out, const unsigned* in) {
  half_mma(out, in);
}
template <int threads> __global__ void gptq_marlin_repack_kernel(unsigned* out) { out[0] = threads; }
}  // namespace marlin

#ifdef CUTLASS_KERNELS
template __global__ void cutlass::device_kernel<enable_sm120_only<int>>(float*, const unsigned*);
template __global__ void cutlass::device_kernel<MainloopSm120TmaWarpSpecializedBlockScaled>(
    float*, const unsigned*);
template __global__ void cutlass::device_kernel<MainloopSm120ArrayTmaWarpSpecializedBlockScaled>(
    float*, const unsigned*);
template __global__ void vllm::cvt_fp16_to_fp4<float>(unsigned short*, const float*);
#endif
#ifdef MARLIN_KERNELS
template __global__ void marlin::Marlin<1125899906909960, 562949953487106, 1125899906909960,
                                        2814749767172868>(float*, const unsigned*);
template __global__ void marlin::gptq_marlin_repack_kernel<256>(unsigned*);
#endif
