/* A PJRT plugin that TorchTPU takes for libtpu and that computes on the CPU.
 *
 * It passes on the function table of XLA's plugin for the CPU, CPU_PJRT_PLUGIN names the file. One
 * entry differs: TorchTPU creates its client with options that only a TPU knows. The CPU's has one,
 * the number of devices, which is one for each process, as with a TPU.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the table begins with (xla/pjrt/c/pjrt_c_api.h); later releases add entries at its end. */
typedef void *(*function)(void *);
struct table {
  size_t size;
  void *extensions;
  struct {
    size_t size;
    void *extensions;
    int major, minor;
  } version;
  function error[3], plugin[2], event[5];
  function create_client;
};

/* PJRT_NamedValue. */
struct option {
  size_t size;
  void *extensions;
  const char *name;
  size_t name_size;
  enum { STRING, INT64 } type;
  int64_t value;
  size_t value_size;
};

/* PJRT_Client_Create_Args. */
struct creation {
  size_t size;
  void *extensions;
  const struct option *options;
  size_t number_of_options;
};

static function create_client;

static void *create_client_on_cpu(void *given) {
  struct creation *creation = given;
  static const struct option count = {
      sizeof count, NULL, "cpu_device_count", sizeof "cpu_device_count" - 1, INT64, 1, 1};
  creation->options = &count;
  creation->number_of_options = 1;
  return create_client(creation);
}

static void stop(const char *why) {
  fprintf(stderr, "libtpu on the CPU: %s\n", why);
  exit(1);
}

const void *GetPjrtApi(void) {
  static struct table *ours;
  if (ours != NULL) return ours;

  const char *path = getenv("CPU_PJRT_PLUGIN");
  if (path == NULL) stop("CPU_PJRT_PLUGIN names no file");
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) stop(dlerror());
  const struct table *(*get)(void);
  *(void **)&get = dlsym(library, "GetPjrtApi");
  if (get == NULL) stop(dlerror());

  const struct table *theirs = get();
  ours = malloc(theirs->size);
  if (ours == NULL) stop("no memory");
  memcpy(ours, theirs, theirs->size);
  create_client = theirs->create_client;
  ours->create_client = create_client_on_cpu;
  return ours;
}
