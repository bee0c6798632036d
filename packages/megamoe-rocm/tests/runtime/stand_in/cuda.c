/* A stand-in for libcuda.so.1: the functions that NvidiaLauncher calls, by the signatures of cuda.h. Each prints what it
 * was called with, a line a call, to the file $STAND_IN_LOG. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const void *const BUFFER_POINTER = (void *)1, *const BUFFER_SIZE = (void *)2, *const END = (void *)0;

static FILE *begin(const char *name) {
    FILE *log = fopen(getenv("STAND_IN_LOG"), "a");
    fprintf(log, "%s ", name);
    return log;
}

static int end(FILE *log) {
    fprintf(log, "\n");
    fclose(log);
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = error ? "invalid argument" : "no error";
    return 0;
}

int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)0x100000000000;
    FILE *log = begin("cuModuleLoadData");
    fprintf(log, "%d", memcmp(image, "\177ELF", 4) == 0);
    return end(log);
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x200000000000;
    FILE *log = begin("cuModuleGetFunction");
    fprintf(log, "%p %s", module, name);
    return end(log);
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
    FILE *log = begin("cuFuncSetAttribute");
    fprintf(log, "%p %d %d", function, attribute, value);
    return end(log);
}

int cuModuleUnload(void *module) {
    FILE *log = begin("cuModuleUnload");
    fprintf(log, "%p", module);
    return end(log);
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void *stream, void **parameters, void **extra) {
    if (parameters || extra[0] != BUFFER_POINTER || extra[2] != BUFFER_SIZE || extra[4] != END) return 1;
    FILE *log = begin("cuLaunchKernel");
    fprintf(log, "%p %u,%u,%u %u,%u,%u %u %p ", function, x, y, z, bx, by, bz, shared_bytes, stream);
    for (size_t i = 0; i < *(size_t *)extra[3]; ++i) fprintf(log, "%02x", ((unsigned char *)extra[1])[i]);
    return end(log);
}
