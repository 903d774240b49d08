// A fake libcuda.so.1: records every call, so that what a real driver would get is compared word for
// word. FAKE_DRIVER, FAKE_SM and FAKE_FAIL ("call=number") say what it is and what fails.
//
// A kernel's name ends in the kinds of its parameters: p pointer, i int32, l int64, f float32. This
// driver reads them as a real one reads what the cubin says. Where a test sets an executor, launches
// are executed and not recorded.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 22];
static size_t used;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local uintptr_t contexts[8];
static _Thread_local int depth;

// What executes kernels, where a test sets one (executing_driver.py); each returns an error or 0.
struct executor {
  int (*load)(uintptr_t module, const char* image);
  int (*find)(const char* function, uintptr_t module, const char* name);
  int (*allow)(const char* function, int shared);
  int (*launch)(const char* function, const unsigned* grid, const unsigned* block, unsigned shared,
                void** arguments);
};
static const struct executor* executor;
void fake_executor(const struct executor* e) { executor = e; }

const char* fake_log(void) { return text; }

// Records a call; returns the error that FAKE_FAIL ("call=number") wants of it.
static int record(const char* call, const char* format, ...) {
  char line[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(line, sizeof line, format, list);
  va_end(list);
  pthread_mutex_lock(&mutex);
  if (used + 1100 < sizeof text)
    used += (size_t)snprintf(text + used, sizeof text - used, "%s%s\n", call, line);
  pthread_mutex_unlock(&mutex);
  const char* fail = getenv("FAKE_FAIL");
  size_t n = strlen(call);
  return fail && !strncmp(fail, call, n) && fail[n] == '=' ? atoi(fail + n + 1) : 0;
}

static int number(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

int cuInit(unsigned flags) { return record("cuInit", " %u", flags); }
int cuDriverGetVersion(int* v) { *v = number("FAKE_DRIVER", 13000); return 0; }
int cuGetErrorName(int e, const char** s) {
  *s = e == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : e == 999 ? "CUDA_ERROR_UNKNOWN"
       : e == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
  return *s ? 0 : 1;
}
int cuGetErrorString(int e, const char** s) {
  *s = e == 701 ? "too many resources requested for launch" : NULL;
  return *s ? 0 : 1;
}
int cuDeviceGetCount(int* n) { *n = number("FAKE_COUNT", 2); return 0; }
int cuDeviceGet(int* d, int i) { *d = i; return 0; }
int cuDeviceGetAttribute(int* v, int which, int d) {
  int sm = d ? 80 : number("FAKE_SM", 90);
  *v = which == 75 ? sm / 10 : which == 76 ? sm % 10 : -1;
  if (which == 16) *v = 132;
  if (which == 97) *v = 232448;
  return 0;
}
int cuDevicePrimaryCtxRetain(uintptr_t* c, int d) {
  *c = 0x1000 + d;
  return record("cuDevicePrimaryCtxRetain", " %d", d);
}
int cuCtxGetCurrent(uintptr_t* c) { *c = depth ? contexts[depth - 1] : 0; return 0; }
int cuCtxGetDevice(int* d) { *d = contexts[depth - 1] & 0xff; return 0; }
int cuCtxPushCurrent_v2(uintptr_t c) {
  contexts[depth++] = c;
  return record("cuCtxPushCurrent", " 0x%lx", c);
}
int cuCtxPopCurrent_v2(uintptr_t* c) {
  *c = contexts[--depth];
  return record("cuCtxPopCurrent", " 0x%lx", *c);
}
int cuModuleLoadData(uintptr_t* m, const char* image) {
  static uintptr_t modules;
  pthread_mutex_lock(&mutex);
  *m = 0x500 + ++modules;
  pthread_mutex_unlock(&mutex);
  int error =
      record("cuModuleLoadData", " %.4s in 0x%lx", image + 64, depth ? contexts[depth - 1] : 0);
  return !error && executor ? executor->load(*m, image) : error;
}
int cuModuleGetFunction(char** f, uintptr_t m, const char* name) {
  *f = strdup(name);
  int error = record("cuModuleGetFunction", " 0x%lx %s", m, name);
  if (!strncmp(name, "missing", 7)) return 500;
  return !error && executor ? executor->find(*f, m, name) : error;
}
int cuFuncSetAttribute(const char* f, int which, int v) {
  int error = record("cuFuncSetAttribute", " %s %d %d", f, which, v);
  return !error && executor && which == 8 ? executor->allow(f, v) : error;
}

int cuFuncSetCacheConfig(const char* f, int which) {
  return record("cuFuncSetCacheConfig", " %s %d", f, which);
}

static void arguments(char* to, const char* name, void** at, void** extra) {
  const char* kind = strrchr(name, '_');
  kind = kind && !kind[1 + strspn(kind + 1, "pilf")] ? kind + 1 : "";
  for (; *kind; ++kind, ++at) {
    if (*kind == 'p') to += sprintf(to, " p%llx", *(unsigned long long*)*at);
    if (*kind == 'i') to += sprintf(to, " i%d", *(int*)*at);
    if (*kind == 'l') to += sprintf(to, " l%lld", *(long long*)*at);
    if (*kind == 'f') to += sprintf(to, " f%g", *(float*)*at);
  }
  sprintf(to, " s%llx s%llx extra%d", *(unsigned long long*)at[0], *(unsigned long long*)at[1],
          extra != NULL);
}
int cuLaunchKernel(const char* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, uintptr_t stream, void** at, void** extra) {
  if (executor)
    return executor->launch(f, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, at);
  char said[900];
  arguments(said, f, at, extra);
  return record("cuLaunchKernel", " %s in 0x%lx grid %u,%u,%u block %u,%u,%u shared %u stream %lx:"
                "%s", f, contexts[depth - 1], gx, gy, gz, bx, by, bz, shared, stream, said);
}
