/* A stand-in for libamdhip64.so: the functions that megamoe_rocm calls through hip-python, by the signatures of
 * hip_runtime_api.h (ROCm 7). It writes what it was called with to the file $STAND_IN_LOG, a line a call. With
 * $STAND_IN_FAIL it fails the function of that name with hipErrorInvalidValue. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1 };
enum { PROPERTIES_BYTES = 1472, MULTI_PROCESSORS = 388, ARCHITECTURE = 1160 }; /* of hipDeviceProp_tR0600 */
static const void *const BUFFER_POINTER = (void *)1, *const BUFFER_SIZE = (void *)2, *const END = (void *)3;

static int call(const char *name, const char *format, ...) {
    FILE *log = fopen(getenv("STAND_IN_LOG"), "a");
    va_list arguments;
    va_start(arguments, format);
    fprintf(log, "%s ", name);
    vfprintf(log, format, arguments);
    fprintf(log, "\n");
    va_end(arguments);
    fclose(log);
    const char *fail = getenv("STAND_IN_FAIL");
    return fail && strcmp(fail, name) == 0 ? INVALID_VALUE : SUCCESS;
}

const char *hipGetErrorString(int error) { return error ? "invalid argument" : "no error"; }

int hipGetDevicePropertiesR0600(void *properties, int device) {
    memset(properties, 0, PROPERTIES_BYTES);
    strcpy(properties, "AMD Instinct MI355X");
    strcpy((char *)properties + ARCHITECTURE, "gfx950:sramecc+:xnack-");
    *(int *)((char *)properties + MULTI_PROCESSORS) = 256;
    return call("hipGetDeviceProperties", "%d", device);
}

int hipDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute;
    *value = 160 * 1024;
    return call("hipDeviceGetAttribute", "%d", device);
}

int hipModuleLoadData(void **module, const void *image) {
    *module = (void *)0x1000;
    return call("hipModuleLoadData", "%d", memcmp(image, "\177ELF", 4) == 0);
}

int hipModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x2000;
    return call("hipModuleGetFunction", "%p %s", module, name);
}

int hipModuleUnload(void *module) { return call("hipModuleUnload", "%p", module); }

int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                          unsigned lds_bytes, void *stream, void **parameters, void **extra) {
    if (parameters || extra[0] != BUFFER_POINTER || extra[2] != BUFFER_SIZE || extra[4] != END) return INVALID_VALUE;
    size_t num_bytes = *(size_t *)extra[3];
    char *bytes = malloc(2 * num_bytes + 1);
    for (size_t i = 0; i < num_bytes; ++i) sprintf(bytes + 2 * i, "%02x", ((unsigned char *)extra[1])[i]);
    int status = call("hipModuleLaunchKernel", "%p %u,%u,%u %u,%u,%u %u %p %s", function, x, y, z, bx, by, bz, lds_bytes,
                      stream, bytes);
    free(bytes);
    return status;
}
