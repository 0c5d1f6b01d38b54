// What SM12x does in one instruction, for Hopper. The meaning of each is in builder/ptx
// (warps.py, registers.py), with its section of the PTX ISA.

// -DROLLED: slower, so that the warps of a block drift apart in another way.
#ifdef ROLLED
#define UNROLL _Pragma("unroll 1")
#else
#define UNROLL _Pragma("unroll")
#endif

// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
__device__ __forceinline__ float e2m1(unsigned code) {
  const unsigned m = code & 7;
  const float value =
      m < 2 ? 0.5f * m : __uint_as_float(((m >> 1) + 126) << 23 | (m & 1) << 22);
  return code & 8 ? -value : value;
}

// E4M3 without its sign.
__device__ __forceinline__ float ue4m3(unsigned code) {
  code &= 0x7f;
  const unsigned exponent = code >> 3, fraction = code & 7;
  if (code == 0x7f) return __uint_as_float(0x7fffffff);
  return exponent ? __uint_as_float((exponent + 120) << 23 | fraction << 20)
                  : fraction * 0.001953125f;
}

struct Four {
  float value[4];
};

// mma.m16n8k64, kind::mxf4nvf4, scale_vec::4X. All 64 products are summed exactly, in double.
extern "C" __device__ __noinline__ Four software_mma(
    unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, float c0,
    float c1, float c2, float c3, unsigned scale_a, unsigned chosen_a, unsigned scale_b,
    unsigned chosen_b) {
  const unsigned all = ~0u, a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  const float c[4] = {c0, c1, c2, c3};
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int t0 = lane & 3, t1 = lane >> 2;
  unsigned factors_a[2], factors_b[2];
UNROLL
  for (int v = 0; v < 2; v++) {
    factors_a[v] = __shfl_sync(all, scale_a, t1 * 4 + v + 2 * (chosen_a >> 16));
    factors_b[v] = __shfl_sync(all, scale_b, (2 * t0 + v) * 4 + (chosen_b >> 16));
  }
  double sum[4] = {0, 0, 0, 0};
UNROLL
  for (int part = 0; part < 8; part++) {  // lane `quad` of four holds k = 8*quad .. +7, +32
    const int quad = part & 3, high = part >> 2, block = 2 * high + quad / 2;
    unsigned rows[2], columns[2];
UNROLL
    for (int v = 0; v < 2; v++) {
      rows[v] = __shfl_sync(all, a[v + 2 * high], t1 * 4 + quad);
      columns[v] = __shfl_sync(all, b[high], (2 * t0 + v) * 4 + quad);
    }
UNROLL
    for (int out = 0; out < 4; out++) {
      const unsigned row = rows[out >> 1], column = columns[out & 1];
      float products = 0;  // of 8 pairs of codes: exact
      for (int k = 0; k < 32; k += 4) products += e2m1(row >> k & 15) * e2m1(column >> k & 15);
      sum[out] += static_cast<double>(products) * ue4m3(factors_a[out >> 1] >> 8 * block) *
                  ue4m3(factors_b[out & 1] >> 8 * block);
    }
  }
  Four result;
UNROLL
  for (int out = 0; out < 4; out++) result.value[out] = static_cast<float>(sum[out] + c[out]);
  return result;
}

// The nearest E2M1 code, ties to the even code; beyond 6 it is 6, of a NaN too.
__device__ __forceinline__ unsigned code_of(float value) {
  const float size = fabsf(value);
  if (isnan(value)) return 7;
  const unsigned code = size <= 0.25f  ? 0
                        : size < 0.75f ? 1
                        : size <= 1.25f ? 2
                        : size < 1.75f  ? 3
                        : size <= 2.5f  ? 4
                        : size < 3.5f   ? 5
                        : size <= 5.0f  ? 6
                                        : 7;
  return (__float_as_uint(value) >> 31) << 3 | code;
}

// cvt.rn.satfinite.e2m1x2.f32: the first operand becomes the upper code.
extern "C" __device__ __noinline__ unsigned software_codes(float high, float low) {
  return code_of(high) << 4 | code_of(low);
}
