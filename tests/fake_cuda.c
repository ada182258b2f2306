/* A stand-in for libcuda.so.1 on machines without a GPU: the functions FlashGen calls, with the
   driver's own signatures. It keeps what the last launch passed, so that a test reads it as the GPU
   would: each parameter is copied from the address given, in the size the kernel declares. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attrs;
  unsigned num_attrs;
} Config;

#define PRIMARY(device) ((void *)(uintptr_t)(0xC0 + (device)))
#define MAX_PARAMS 128

static __thread void *stack[16];
static __thread int depth;

int fake_param_count, fake_launches, fake_torn, fake_fail_launch, fake_encodes, fake_replaces, fake_loads, fake_unloads;
size_t fake_param_size[MAX_PARAMS];
unsigned char fake_params[8192];
Config fake_config;
void *fake_launch_context;
int fake_attribute[128];
int fake_function_attribute[16];
int fake_devices = 2;
char fake_name[64] = "NVIDIA H200";

void fake_reset(void) {
  fake_param_count = fake_launches = fake_fail_launch = fake_encodes = fake_replaces = 0;
  fake_loads = fake_unloads = fake_torn = 0;
  memset(fake_params, 0, sizeof fake_params);
  memset(&fake_config, 0, sizeof fake_config);
}
void fake_set_current(int device) { depth = 1; stack[1] = device < 0 ? 0 : PRIMARY(device); }
void *fake_get_current(void) { return stack[depth]; }

int cuInit(unsigned flags) { return fake_devices ? 0 : 100; }
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) { *n = fake_devices; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return i < 0 || i >= fake_devices ? 101 : 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, fake_name, n); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = fake_attribute[a]; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = PRIMARY(d); return 0; }
int cuCtxGetCurrent(void **c) { *c = stack[depth]; return 0; }
int cuCtxPushCurrent_v2(void *c) { stack[++depth] = c; return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = stack[depth--]; return 0; }
int cuModuleLoadData(void **m, const void *image) {
  if (memcmp(image, "\177ELF", 4)) return 200;
  fake_loads++;
  *m = (void *)0x30D;
  return stack[depth] ? 0 : 201;
}
int cuModuleUnload(void *m) { fake_unloads++; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = (void *)0xF; return strlen(name) ? 0 : 500; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = fake_function_attribute[a]; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { fake_function_attribute[a] = v; return 0; }
int cuFuncSetCacheConfig(void *f, int c) { return 0; }
int cuFuncGetParamInfo(void *f, size_t i, size_t *offset, size_t *size) {
  if (i >= (size_t)fake_param_count) return 1;
  *size = fake_param_size[i];
  return 0;
}
int cuLaunchKernelEx(const Config *config, void *f, void **params, void **extra) {
  if (!f) return 400;
  if (!stack[depth]) return 201;
  if (fake_fail_launch) return fake_fail_launch;
  unsigned char *to = fake_params;
  for (int i = 0; i < fake_param_count; i++) {
    memcpy(to, params[i], fake_param_size[i]);
    to += fake_param_size[i];
  }
  /* Torn: a test launches with the first pointer as the stream. */
  if (fake_param_count && *(void **)params[0] != config->stream) __sync_fetch_and_add(&fake_torn, 1);
  fake_config = *config;
  fake_launch_context = stack[depth];
  __sync_fetch_and_add(&fake_launches, 1);
  return 0;
}
/* The map is opaque; here its first 8 bytes are the address, then rank, type, swizzle, then dims, strides, box. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || interleave || promotion != 2 || fill) return 1;
  for (unsigned i = 0; i < rank; i++)
    if (!dims[i] || !box[i] || box[i] > 256 || steps[i] != 1) return 1;
  for (unsigned i = 0; i + 1 < rank; i++)
    if (strides[i] % 16 || strides[i] >> 40) return 1;
  map[0] = (uint64_t)(uintptr_t)address;
  map[1] = rank | type << 8 | swizzle << 16;
  for (unsigned i = 0; i < rank; i++) map[2 + i] = dims[i];
  for (unsigned i = 0; i + 1 < rank; i++) map[6 + i] = strides[i];
  for (unsigned i = 0; i < rank; i++) map[9 + i] = box[i];
  fake_encodes++;
  return 0;
}
int cuTensorMapReplaceAddress(uint64_t *map, void *address) {
  if ((uintptr_t)address % 16) return 1;
  map[0] = (uint64_t)(uintptr_t)address;
  fake_replaces++;
  return 0;
}
int cuGetErrorName(int code, const char **s) {
  *s = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 100 ? "CUDA_ERROR_NO_DEVICE"
     : code == 200 ? "CUDA_ERROR_INVALID_IMAGE" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuGetErrorString(int code, const char **s) { *s = "as the stand-in says"; return 0; }
