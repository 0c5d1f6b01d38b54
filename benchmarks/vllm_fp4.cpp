// The launches of vLLM's own NVFP4 kernels for SM12x, as the release's operators make them.
//
//     program OPERATOR TENSOR...
//
// A tensor is TYPE:ADDRESS:SIZExSIZE, contiguous.  Stands in for torch: of its stable interface what
// these operators use.  Memory that an operator asks for is a line {"allocated", "bytes"};
// cuda_host.cpp prints the launches, and says what standard input is.

#include "ops.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

// Memory of torch::empty: each array begins so far behind the one before.
constexpr uint64_t kFirst = 1ull << 32, kApart = 1 << 16;

struct AtenTensorOpaque {
  uint64_t address = 0;
  int32_t type = 0;
  std::vector<int64_t> sizes, strides;

  AtenTensorOpaque() = default;
  AtenTensorOpaque(uint64_t address, int32_t type, std::vector<int64_t> given)
      : address(address), type(type), sizes(given), strides(given.size()) {
    int64_t step = 1;
    for (size_t n = sizes.size(); n-- > 0; step *= sizes[n]) strides[n] = step;
  }
  int64_t count() const { return sizes.empty() ? 1 : sizes[0] * strides[0]; }
};
struct StableListOpaque {
  std::vector<StableIValue> items;
};

// Of types only the names matter, and that they differ.
#define TYPES(X)                                                                               \
  X(uint8, 1) X(int8, 1) X(int16, 2) X(int32, 4) X(int64, 8) X(float16, 2) X(bfloat16, 2)      \
  X(float32, 4) X(float64, 8) X(bool, 1) X(float8_e4m3fn, 1) X(float8_e5m2, 1) X(uint16, 2)    \
  X(uint32, 4) X(uint64, 8) X(complex32, 4) X(complex64, 8) X(complex128, 16)                  \
  X(float8_e4m3fnuz, 1) X(float8_e5m2fnuz, 1)
enum { 
#define NUMBER(name, size) k_##name,
  TYPES(NUMBER)
};
constexpr const char* kNames[] = {
#define NAME(name, size) #name,
    TYPES(NAME)};
constexpr int kSizes[] = {
#define SIZE(name, size) size,
    TYPES(SIZE)};

extern "C" {
#define FUNCTION(name, size) \
  int32_t aoti_torch_dtype_##name() { return k_##name; }
TYPES(FUNCTION)
int32_t torch_dtype_float8_e8m0fnu() { return 100; }
int32_t torch_dtype_float4_e2m1fn_x2() { return 101; }
// Devices, memory formats and layouts: only the first CUDA device, contiguous, occurs.
#define ANSWERS(X)                                                                             \
  X(device_type_cpu, 0) X(device_type_cuda, 1) X(device_type_mps, 2) X(device_type_xpu, 3)     \
  X(device_type_meta, 4) X(device_type_privateuse1, 5) X(memory_format_contiguous_format, 0)   \
  X(memory_format_channels_last, 1) X(memory_format_channels_last_3d, 2)                       \
  X(memory_format_preserve_format, 3) X(layout_strided, 0) X(layout__mkldnn, 1)                \
  X(layout_jagged, 2) X(layout_sparse_bsc, 3) X(layout_sparse_bsr, 4) X(layout_sparse_coo, 5)  \
  X(layout_sparse_csc, 6) X(layout_sparse_csr, 7)
#define ANSWER(name, number) \
  int32_t aoti_torch_##name() { return number; }
ANSWERS(ANSWER)
uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }

AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* result) {
  *result = new AtenTensorOpaque;
  return 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle one) {
  delete one;
  return 0;
}
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle one, void** result) {
  *result = (void*)one->address;
  return 0;
}
AOTITorchError aoti_torch_get_dim(AtenTensorHandle one, int64_t* result) {
  *result = one->sizes.size();
  return 0;
}
AOTITorchError aoti_torch_get_numel(AtenTensorHandle one, int64_t* result) {
  *result = one->count();
  return 0;
}
AOTITorchError aoti_torch_get_size(AtenTensorHandle one, int64_t dim, int64_t* result) {
  *result = one->sizes.at(dim < 0 ? dim + one->sizes.size() : dim);
  return 0;
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle one, int64_t** result) {
  *result = one->sizes.data();
  return 0;
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle one, int64_t dim, int64_t* result) {
  *result = one->strides.at(dim < 0 ? dim + one->sizes.size() : dim);
  return 0;
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle, bool* result) {
  *result = true;
  return 0;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle one, int32_t* result) {
  *result = one->type;
  return 0;
}
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* result) {
  *result = aoti_torch_device_type_cuda();
  return 0;
}
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* result) {
  *result = 0;
  return 0;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*) { return 0; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** result) {
  *result = nullptr;
  return 0;
}

AOTITorchError torch_new_list_reserve_size(size_t, StableListHandle* result) {
  *result = new StableListOpaque;
  return 0;
}
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue item) {
  list->items.push_back(item);
  return 0;
}
AOTITorchError torch_delete_list(StableListHandle list) {
  delete list;
  return 0;
}
// aten::empty; an optional argument is the address of its value.
AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  if (strcmp(name, "aten::empty")) return 1;
  auto list = (StableListHandle)stack[0];
  static uint64_t next = kFirst;
  auto sizes = std::vector<int64_t>(list->items.begin(), list->items.end());
  int32_t type = stack[1] ? *(int32_t*)stack[1] : k_float32;
  auto result = new AtenTensorOpaque(next, type, sizes);
  uint64_t bytes = result->count() * kSizes[type];
  if (bytes) printf("{\"allocated\": %zu, \"bytes\": %zu}\n", (size_t)next, (size_t)bytes);
  next += (bytes + kApart - 1) / kApart * kApart + kApart;
  stack[0] = (StableIValue)result;
  return 0;
}

// Operators are called by their functions, not by names.
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                            TorchLibraryHandle*) {
  return 0;
}
AOTITorchError torch_library_impl(TorchLibraryHandle, const char*,
                                  void (*)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  return 0;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
}

torch::stable::Tensor tensor(const char* word) {
  std::istringstream words(word);
  std::string type, address, size;
  std::getline(words, type, ':');
  std::getline(words, address, ':');
  std::vector<int64_t> sizes;
  while (std::getline(words, size, 'x')) sizes.push_back(std::stoll(size));
  for (int32_t n = 0; n < (int32_t)std::size(kNames); n++)
    if (type == kNames[n])
      return torch::stable::Tensor(new AtenTensorOpaque(std::stoull(address), n, sizes));
  fprintf(stderr, "vllm_fp4.cpp: no type %s\n", type.c_str());
  exit(2);
}

int main(int count, char** words) {
  std::vector<torch::stable::Tensor> t;
  for (int n = 2; n < count; n++) t.push_back(tensor(words[n]));
  std::string name = words[1];
  if (name == "mm") {
    cutlass_scaled_fp4_mm(t.at(0), t.at(1), t.at(2), t.at(3), t.at(4), t.at(5));
  } else if (name == "quant" || name == "quant plain") {
    scaled_fp4_quant_out(t.at(2), t.at(3), name == "quant", t.at(0), t.at(1));
  } else if (name == "silu quant") {
    silu_and_mul_nvfp4_quant(t.at(0), t.at(1), t.at(2), t.at(3));
  } else if (name == "experts quant") {
    scaled_fp4_experts_quant(t.at(0), t.at(1), t.at(2), t.at(3), t.at(4), t.at(5));
  } else if (name == "experts silu quant") {
    silu_and_mul_scaled_fp4_experts_quant(t.at(0), t.at(1), t.at(2), t.at(3), t.at(4), t.at(5));
  } else if (name == "experts mm") {
    cutlass_fp4_group_mm(t.at(0), t.at(1), t.at(2), t.at(3), t.at(4), t.at(5), t.at(6), t.at(7),
                         t.at(8));
  } else {
    return 2;
  }
}
