// Kernels as people write them, one idea each.  `in` has 4096 words of any bits, `out` 4096 words of
// zero.  KERNEL(name, blocks, threads) is read by test_kernels.py.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/atomic>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>
#include <mma.h>
#include <cassert>
#include <cstdio>
namespace cg = cooperative_groups;
#define KERNEL(name, blocks, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const unsigned *in, unsigned *out)
#define HERE (blockIdx.x * blockDim.x + threadIdx.x)
__constant__ unsigned table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ unsigned counter = 7;
__device__ unsigned board[256];
__device__ const char *words[2] = {"even", "odd"};

KERNEL(early_return, 2, 96) { if (HERE % 3 == 1) return; out[HERE] = in[HERE] + 1; }
KERNEL(early_return_then_barrier, 1, 128) {
  __shared__ unsigned s[128];
  if (threadIdx.x >= 100) return;
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[99 - threadIdx.x];
}
KERNEL(odd_block, 3, 45) { out[HERE] = in[HERE] ^ 5; }
KERNEL(odd_block_barrier, 1, 77) {
  __shared__ unsigned s[77];
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[76 - threadIdx.x];
}
KERNEL(half_warp_shuffle, 1, 48) {
  unsigned mask = __activemask(), v = in[threadIdx.x];
  for (int d = 8; d; d /= 2) v += __shfl_xor_sync(mask, v, d, 16);
  out[threadIdx.x] = v;
}
KERNEL(shuffles_by_branch, 1, 32) {
  unsigned v = in[threadIdx.x];
  if (threadIdx.x < 16) v = __shfl_down_sync(0xffff, v, 3, 16); else v = __shfl_up_sync(0xffff0000, v, 2, 16);
  out[threadIdx.x] = v;
}
KERNEL(ballot_by_lane_masks, 1, 32) {
  unsigned odd = threadIdx.x & 1, m = odd ? 0xaaaaaaaa : 0x55555555, r;
  if (odd) r = __ballot_sync(m, in[threadIdx.x] & 4); else r = __ballot_sync(m, in[threadIdx.x] & 8);
  out[threadIdx.x] = r;
}
KERNEL(one_call_several_masks, 1, 32) {
  unsigned m = 0xffu << (threadIdx.x / 8 * 8), v = in[threadIdx.x];
  for (int d = 4; d; d /= 2) v += __shfl_xor_sync(m, v, d);
  __syncwarp(m);
  out[threadIdx.x] = v + __any_sync(m, v & 1) + 2 * __all_sync(m, v | 1);
}
KERNEL(spin_lock_in_a_warp, 2, 64) {
  bool done = false;
  while (!done) {
    if (atomicCAS(&out[0], 0u, 1u) == 0) {
      __threadfence();
      volatile unsigned *p = out + 1;
      *p = *p + 1 + (in[HERE] & 3);
      __threadfence();
      atomicExch(&out[0], 0u);
      done = true;
    }
  }
}
KERNEL(spin_lock_plain, 1, 40) {
  __shared__ int lock; __shared__ unsigned sum;
  if (threadIdx.x == 0) { lock = 0; sum = 0; }
  __syncthreads();
  while (atomicCAS(&lock, 0, 1)) {}
  __threadfence_block();
  *(volatile unsigned *)&sum += in[threadIdx.x];
  __threadfence_block();
  atomicExch(&lock, 0);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = sum;
}
KERNEL(producer_and_consumer_lanes, 1, 32) {
  volatile unsigned *flag = out + 64;
  if (threadIdx.x < 16) { while (flag[threadIdx.x] == 0) {} out[threadIdx.x] = flag[threadIdx.x]; }
  else flag[threadIdx.x - 16] = in[threadIdx.x] | 1;
}
__device__ unsigned fib(unsigned n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
KERNEL(recursion, 1, 32) { out[HERE] = fib(threadIdx.x % 9); }
__noinline__ __device__ unsigned twice(unsigned a, float b) { return a * 2 + (unsigned)b; }
KERNEL(calls, 1, 64) { out[HERE] = twice(in[HERE], threadIdx.x * 0.5f) + twice(3, 4.0f); }
__noinline__ __device__ void fill(unsigned *to, unsigned n, unsigned v) { for (unsigned k = 0; k < n; k++) to[k] = v + k; }
KERNEL(local_arrays_by_pointer, 1, 33) {
  unsigned a[10];
  fill(a, 10, in[HERE]);
  unsigned s = 0;
  for (int k = 0; k < 10; k++) s ^= a[(k * 7 + in[HERE]) % 10] << k;
  out[HERE] = s;
}
typedef unsigned (*op)(unsigned, unsigned);
__noinline__ __device__ unsigned plus(unsigned a, unsigned b) { return a + b; }
__noinline__ __device__ unsigned times(unsigned a, unsigned b) { return a * b; }
__device__ op ops[2] = {plus, times};
KERNEL(function_pointers, 1, 32) { out[HERE] = ops[in[HERE] & 1](in[HERE], 3); }
KERNEL(print, 1, 3) {
  printf("thread %d of %u: %s %5.2f %llx %c%%\n", threadIdx.x, blockDim.x, words[threadIdx.x & 1], in[0] * 1e-9, 0x123456789abcull, 'x');
  out[HERE] = 1;
}
KERNEL(assertion, 1, 32) { assert(in != nullptr); out[HERE] = 2; }
KERNEL(constants_and_globals, 2, 32) {
  atomicAdd(&counter, 1u);
  board[HERE] = table[in[HERE] % 8];
  out[HERE] = board[HERE] + table[threadIdx.x % 8];
}
KERNEL(integers, 4, 64) {
  unsigned a = in[2 * HERE], b = in[2 * HERE + 1];
  unsigned long long c = (unsigned long long)a << 32 | b;
  out[HERE] = __popc(a) + __clz(a) * 64 + __brev(b) + __popcll(c) * 3 + __clzll(c) * 5 + __ffs(a) * 7 + __ffsll(c) * 11 +
      (unsigned)__brevll(c) + __mulhi((int)a, (int)b) + __umulhi(a, b) + (unsigned)__umul64hi(c, c * 3) +
      (unsigned)__mul64hi(c, -c) + __byte_perm(a, b, 0x5140) + __funnelshift_l(a, b, a) + __funnelshift_r(a, b, b) +
      __funnelshift_lc(a, b, a & 63) + __sad((int)a, (int)b, b) + __usad(a, b, a) + __hadd((int)a, (int)b) + __rhadd((int)a, (int)b) +
      __mul24((int)a, (int)b) + __umul24(a, b) + (a / (b | 1)) + (a % (b | 1)) + (unsigned)(c / (a | 1)) + (int)a / ((int)b | 1);
}
KERNEL(bit_fields, 2, 64) {
  unsigned a = in[2 * HERE], b = in[2 * HERE + 1], r, s, t, u;
  long long q;
  asm("bfe.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b & 31), "r"(b >> 8 & 31));
  asm("bfe.s32 %0, %1, %2, %3;" : "=r"(s) : "r"(a), "r"(b & 255), "r"(b >> 8 & 255));
  asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(t) : "r"(a), "r"(b), "r"(b & 255), "r"(a & 31));
  asm("bfind.shiftamt.s32 %0, %1;" : "=r"(u) : "r"(a >> (b & 31)));
  asm("bfe.s64 %0, %1, %2, %3;" : "=l"(q) : "l"((long long)a << 20 ^ b), "r"(b & 63), "r"(a & 63));
  unsigned m, f; asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(m) : "r"(a & 63), "r"(b & 63));
  asm("fns.b32 %0, %1, %2, %3;" : "=r"(f) : "r"(a), "r"(b & 31), "r"(1));
  out[HERE] = r + s * 3 + t * 5 + u * 7 + (unsigned)q * 9 + (unsigned)(q >> 32) + m + f;
}
KERNEL(dot_products, 2, 64) {
  out[HERE] = __dp4a((int)in[HERE], (int)in[HERE + 1], 5) + __dp4a(in[HERE], in[HERE + 1], 6u) +
      __dp2a_lo((int)in[HERE], (int)in[HERE + 2], 7) + __dp2a_hi(in[HERE], in[HERE + 3], 8u) + __vadd2(in[HERE], in[HERE + 4]) +
      __vmaxs4(in[HERE], in[HERE + 5]) + __vabsdiffu4(in[HERE], in[HERE + 6]);
}
KERNEL(wide_sums, 1, 64) {  // carries
  unsigned __int128 a = (unsigned __int128)in[HERE] << 70 | in[HERE + 1], b = a * (in[HERE + 2] | 1) - in[HERE + 3];
  out[HERE] = (unsigned)(b >> 64) ^ (unsigned)b ^ (unsigned)(b >> 32);
}
KERNEL(match, 1, 32) {
  int p; unsigned a = __match_any_sync(~0u, in[HERE] & 3), b = __match_all_sync(~0u, 5, &p);
  out[HERE] = a + b + p;
}
KERNEL(reductions, 1, 64) {
  unsigned v = in[HERE];
  out[HERE] = __reduce_add_sync(~0u, v) + __reduce_max_sync(~0u, (int)v) + __reduce_min_sync(~0u, v) + __reduce_xor_sync(~0u, v);
}
KERNEL(atomics_global, 2, 64) {
  unsigned v = in[HERE];
  atomicAdd(out + v % 8, v); atomicSub(out + 8 + v % 2, v); atomicMin((int *)out + 16, (int)v); atomicMax(out + 17, v);
  atomicAnd(out + 18 + v % 2, v); atomicOr(out + 20, v); atomicXor(out + 21, v); atomicInc(out + 22, 50); atomicDec(out + 23, 70);
  atomicAdd((unsigned long long *)out + 12, (unsigned long long)v << 8); atomicMax((long long *)out + 13, (long long)v - 5);
  atomicMin((unsigned long long *)out + 14, (unsigned long long)v); atomicXor((unsigned long long *)out + 15, (unsigned long long)v * v);
}
KERNEL(atomics_shared, 1, 96) {
  __shared__ unsigned h[16]; __shared__ unsigned long long big;
  if (threadIdx.x < 16) h[threadIdx.x] = 0;
  if (threadIdx.x == 0) big = 0;
  __syncthreads();
  atomicAdd(&h[in[HERE] % 16], 1u); atomicAdd(&big, (unsigned long long)in[HERE]);
  __syncthreads();
  if (threadIdx.x < 16) out[threadIdx.x] = h[threadIdx.x];
  if (threadIdx.x == 16) out[16] = (unsigned)big, out[17] = (unsigned)(big >> 32);
}
KERNEL(atomics_float, 1, 64) {
  float f = (float)(in[HERE] % 64); atomicAdd((float *)out, f); atomicAdd((double *)out + 1, (double)f);
  atomicAdd((__half2 *)(out + 4), __floats2half2_rn(1, (in[HERE] & 1))); atomicAdd((__nv_bfloat16 *)(out + 5), __float2bfloat16(1));
  atomicAdd((__half *)(out + 6) + 1, __float2half(2)); atomicExch((float *)out + 7, 2.5f);
}
KERNEL(atomic_max_by_cas, 1, 64) {
  int *p = (int *)out, old = *p, seen; float v = in[HERE] % 1000 * 0.25f;
  do { seen = old; if (__int_as_float(seen) >= v) break; old = atomicCAS(p, seen, __float_as_int(v)); } while (old != seen);
}
KERNEL(atomics_by_scope, 1, 64) {
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> d(out[0]); cuda::atomic_ref<unsigned, cuda::thread_scope_block> b(out[1]);
  d.fetch_add(in[HERE], cuda::memory_order_acq_rel); b.fetch_or(in[HERE], cuda::memory_order_release);
  cuda::atomic_ref<int, cuda::thread_scope_system> s(((int *)out)[2]); s.fetch_max((int)in[HERE]);
  unsigned want = 0; cuda::atomic_ref<unsigned> c(out[3]); c.compare_exchange_strong(want, 9);
}
KERNEL(generic_pointers, 1, 64) {
  __shared__ unsigned s[64];
  s[threadIdx.x] = in[HERE];
  __syncthreads();
  const unsigned *p = in[HERE] & 1 ? s : in;
  unsigned *q = in[HERE] & 2 ? s + threadIdx.x : out + 64 + threadIdx.x;
  unsigned v = p[63 - threadIdx.x];
  __syncthreads();
  atomicAdd(q, 5u);
  __syncthreads();
  out[HERE] = v + s[threadIdx.x];
}
KERNEL(doubles, 2, 64) {
  double a = (int)in[HERE] * 1.25e-3, b = (int)in[HERE + 1] / 3.0, c = fma(a, b, -a * b) + sqrt(fabs(a)) / b + rint(a) - floor(b) + ceil(a) + trunc(b);
  c += __drcp_rn(b) + __dadd_rz(a, b) + __dmul_ru(a, b) + __ddiv_rd(a, b) + __fma_rz(a, b, a) + fmin(a, b) + fmax(a, b) + copysign(a, b);
  long long r = __double_as_longlong(c); out[2 * HERE] = (unsigned)r; out[2 * HERE + 1] = (unsigned)(r >> 32) + (unsigned)(int)a + (unsigned)__double2ll_rn(b) + (a < b) + __float_as_uint((float)a);
}
KERNEL(double_functions, 1, 64) {
  double a = in[HERE] % 1000 * 0.01 + 0.1; double c = exp(a) + log(a) + sin(a) + cos(a) + pow(a, 1.5) + tanh(a) + cbrt(a) + erf(a);
  long long r = __double_as_longlong(c); out[2 * HERE] = (unsigned)r; out[2 * HERE + 1] = (unsigned)(r >> 32);
}
KERNEL(floats_rounded, 2, 64) {
  float a = (int)in[HERE] * 0.37f, b = (int)in[HERE + 1] * 1e-5f;
  out[HERE] = __float_as_uint(__fadd_rz(a, b)) + __float_as_uint(__fmul_ru(a, b)) + __float_as_uint(__fmaf_rd(a, b, b)) + __float_as_uint(__fdiv_rn(a, b)) +
     __float_as_uint(__fsqrt_rn(fabsf(a))) + __float_as_uint(__frcp_rn(b)) + __float_as_uint(copysignf(a, b)) + __float_as_uint(fminf(a, b)) + __float2int_rd(a) + __float2uint_rz(b) +
     __float_as_uint(__ll2float_rn((long long)a)) + __float_as_uint(__uint2float_rz(in[HERE])) + __float_as_uint(a / b) + __float_as_uint(sqrtf(fabsf(b))) + (unsigned)isnan(a) + (unsigned)__float2ll_rz(a);
}
KERNEL(float_functions, 1, 64) {
  float a = in[HERE] % 1000 * 0.01f + 0.1f;
  out[HERE] = (unsigned)(expf(a) * 16 + logf(a) * 64 + sinf(a) * 64 + cosf(a) * 64 + powf(a, 1.5f) * 4 + tanhf(a) * 64 + rsqrtf(a) * 64 + fmodf(a, 0.3f) * 64 + 0.5f);
}
KERNEL(halves, 1, 64) {
  __half a = __ushort_as_half(in[HERE] & 0xbfff), b = __float2half((int)in[HERE + 1] * 1e-6f), c = __hadd(a, b) * a - b;
  c = __hfma(a, b, c) / b; c = __hmax(c, a) + __hmin(a, b) + __habs(a) + __hneg(b); bool g = __hgt(a, b);
  __half2 p = __halves2half2(a, b), q = __hfma2(p, p, __half2half2(c)); q = __hmul2(q, p); q = __hmax2(p, q);
  out[HERE] = __half_as_ushort(c) + g + *(unsigned *)&q + (unsigned)__half2int_rn(b) + __half_as_ushort(__int2half_rn(in[HERE] & 1023)) + __half_as_ushort(hsqrt(__habs(b))) ;
}
KERNEL(bfloats, 1, 64) {
  __nv_bfloat16 a = __float2bfloat16((int)in[HERE] * 1e-4f), b = __float2bfloat16((int)in[HERE + 1] * 1e-6f), c = __hfma(a, b, a) * b + a;
  __nv_bfloat162 p = __halves2bfloat162(a, b), q = __hfma2(p, p, p); c = __hmax(c, a); q = __hmin2(q, p);
  out[HERE] = __bfloat16_as_ushort(c) + *(unsigned *)&q + (a < b) + (unsigned)__bfloat162float(b) + __bfloat16_as_ushort(__habs(a)) + __bfloat16_as_ushort(__hneg(a));
}
KERNEL(fp8, 1, 64) {
  float x = (int)in[HERE] * 1e-7f; __nv_fp8_e4m3 a(x); __nv_fp8_e5m2 b(x * 3);
  __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)in[HERE] & 0x7b7b, __NV_E5M2);
  out[HERE] = a.__x + b.__x * 256 + (unsigned)(float(a) * 8) + (unsigned)(float(b)) + h.x + h.y;
}
KERNEL(block_reduce, 2, 160) {
  __shared__ float s[32]; float v = in[HERE] % 100;
  for (int d = 16; d; d >>= 1) v += __shfl_down_sync(~0u, v, d);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0;
    for (int d = 16; d; d >>= 1) v += __shfl_down_sync(~0u, v, d);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
  }
}
KERNEL(scan, 1, 256) {
  __shared__ unsigned s[512]; unsigned t = threadIdx.x; int at = 0; s[t] = in[t];
  __syncthreads();
  for (int d = 1; d < 256; d *= 2) { at ^= 1; s[at * 256 + t] = s[(at ^ 1) * 256 + t] + (t >= d ? s[(at ^ 1) * 256 + t - d] : 0); __syncthreads(); }
  out[t] = s[at * 256 + t];
}
KERNEL(votes_of_a_block, 1, 96) {
  unsigned a = __syncthreads_count(in[HERE] & 1), b = __syncthreads_and(in[HERE] | 1), c = __syncthreads_or((in[HERE] & 255) == 300);
  out[HERE] = a * 4 + b * 2 + c;
}
KERNEL(copies_async, 1, 64) {
  __shared__ __align__(16) unsigned s[256];
  __pipeline_memcpy_async(s + 4 * threadIdx.x, in + 4 * threadIdx.x, 16); __pipeline_commit(); __pipeline_wait_prior(0);
  __syncthreads();
  out[threadIdx.x] = s[255 - threadIdx.x];
}
KERNEL(copies_async_all, 1, 32) {
  __shared__ unsigned s[32];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)), "l"(in + threadIdx.x));
  asm volatile("cp.async.wait_all;"); __syncthreads(); out[threadIdx.x] = s[31 - threadIdx.x];
}
KERNEL(coalesced_group, 1, 64) {
  if (in[HERE] & 1) { auto g = cg::coalesced_threads(); out[HERE] = g.size() * 100 + g.thread_rank(); unsigned v = g.shfl(in[HERE], 0); out[64 + HERE] = v; }
}
KERNEL(tiles, 1, 64) {
  auto t = cg::tiled_partition<8>(cg::this_thread_block()); unsigned v = cg::reduce(t, in[HERE], cg::plus<unsigned>());
  out[HERE] = v + t.meta_group_rank() + t.any(in[HERE] & 1) + t.shfl_xor(v, 1);
  cg::this_thread_block().sync();
}
KERNEL(grid_barrier_by_hand, 4, 32) {
  out[16 + HERE] = in[HERE];
  __syncthreads();
  if (threadIdx.x == 0) { __threadfence(); atomicAdd(out, 1u); while (*(volatile unsigned *)out < gridDim.x) {} __threadfence(); }
  __syncthreads();
  out[16 + 128 + HERE] = ((volatile unsigned *)out)[16 + 127 - HERE];
}
KERNEL(last_block_adds, 6, 32) {
  __shared__ bool last; volatile unsigned *o = out + 8; if (threadIdx.x == 0) { o[blockIdx.x] = in[blockIdx.x]; __threadfence(); last = atomicInc(out, gridDim.x - 1) == gridDim.x - 1; }
  __syncthreads();
  if (last && threadIdx.x == 0) { unsigned s = 0; for (int k = 0; k < gridDim.x; k++) s += o[k]; out[1] = s; }
}
KERNEL(wmma_halves, 1, 32) {
  using namespace nvcuda::wmma; __shared__ __align__(32) __half a[256]; __shared__ __align__(32) float d[256];
  for (int k = threadIdx.x; k < 256; k += 32) a[k] = __float2half((float)(in[k] % 16) - 8);
  __syncwarp(); fragment<matrix_a, 16, 16, 16, __half, row_major> x; fragment<matrix_b, 16, 16, 16, __half, col_major> y; fragment<accumulator, 16, 16, 16, float> z;
  fill_fragment(z, 1); load_matrix_sync(x, a, 16); load_matrix_sync(y, a, 16); mma_sync(z, x, y, z); store_matrix_sync(d, z, 16, mem_row_major); __syncwarp();
  for (int k = threadIdx.x; k < 256; k += 32) out[k] = (int)d[k];
}
KERNEL(mma_s8, 1, 32) {
  int d[4] = {1, 2, 3, 4}; asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(in[HERE]), "r"(in[HERE + 32]), "r"(in[HERE + 64]), "r"(in[HERE + 96]), "r"(in[HERE + 128]), "r"(in[HERE + 160]));
  for (int k = 0; k < 4; k++) out[4 * HERE + k] = d[k];
}
KERNEL(mma_tf32, 1, 32) {
  float d[4] = {1, 2, 3, 4}; auto f = [&](int k) { return __float_as_uint((float)(in[HERE + k] % 32) - 16); };
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(f(0)), "r"(f(32)), "r"(f(64)), "r"(f(96)), "r"(f(128)), "r"(f(160)));
  for (int k = 0; k < 4; k++) out[4 * HERE + k] = __float_as_uint(d[k]);
}
KERNEL(mma_f64, 1, 32) {
  double d[2] = {1, 2}; asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%0,%1};" : "+d"(d[0]), "+d"(d[1]) : "d"((double)(int)in[HERE]), "d"((double)(int)in[HERE + 32] / 7));
  for (int k = 0; k < 2; k++) { long long r = __double_as_longlong(d[k]); out[4 * HERE + 2 * k] = (unsigned)r; out[4 * HERE + 2 * k + 1] = (unsigned)(r >> 32); }
}
KERNEL(mma_half_sums, 1, 32) {
  unsigned d[2] = {0x3c003c00, 0x40003c00}; auto f = [&](int k) { __half2 h = __floats2half2_rn((float)(in[HERE + k] % 8) - 4, (float)(in[HERE + k] / 8 % 8) - 4); return *(unsigned *)&h; };
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%0,%1};" : "+r"(d[0]), "+r"(d[1]) : "r"(f(0)), "r"(f(32)), "r"(f(64)), "r"(f(96)), "r"(f(128)), "r"(f(160)));
  out[2 * HERE] = d[0]; out[2 * HERE + 1] = d[1];
}
KERNEL(clocks, 1, 32) { long long a = clock64(); unsigned b = clock(); out[HERE] = clock64() >= a && (unsigned)clock() - b < 1u << 30; __nanosleep(20); }
KERNEL(sizes, 2, 64) {
  unsigned w, s; asm("mov.u32 %0, %%nsmid;" : "=r"(w)); asm("mov.u32 %0, %%smid;" : "=r"(s)); out[HERE] = (s < w) + gridDim.x + warpSize;
}
KERNEL(dynamic_index_of_a_struct, 1, 32) { struct S { unsigned v[6]; } s; for (int k = 0; k < 6; k++) s.v[k] = in[k] * k; out[HERE] = s.v[threadIdx.x % 6]; }
KERNEL(switches, 1, 96) {
  unsigned v = in[HERE];
  switch (v % 9) { case 0: v += 3; break; case 1: v *= 5; case 2: v ^= 7; break; case 3: v = v << 3; break; case 4: v -= 1; break; case 5: v = ~v; break; case 6: v /= 3; break; case 7: v %= 1000; break; default: v = 0; }
  out[HERE] = v;
}
KERNEL(collatz, 2, 64) { unsigned v = in[HERE] % 1000 + 1, n = 0; while (v != 1) { v = v & 1 ? 3 * v + 1 : v / 2; n++; } out[HERE] = n; }
KERNEL(transpose, 4, 256) {
  __shared__ unsigned s[16][17]; unsigned x = threadIdx.x % 16, y = threadIdx.x / 16; s[y][x] = in[blockIdx.x * 256 + threadIdx.x];
  __syncthreads(); out[blockIdx.x * 256 + threadIdx.x] = s[x][y];
}
KERNEL(allocate, 1, 8) { unsigned *p = (unsigned *)malloc(64); p[3] = in[HERE]; out[HERE] = p[3]; free(p); }
