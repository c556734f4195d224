// Declarations that the parts of the ghost GPU share: its log, and the kind of memory of a pointer.
#pragma once
#include <stddef.h>

// Write a line to the file in GHOST_LOG, followed by ".PID". Without this variable, do nothing.
void ghost_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Log a kernel launch as "KIND NAME", preceded by "captured" while a CUDA graph is recorded.
void ghost_launch(const char *kind, const char *name);

enum ghost_place { PAGEABLE, DEVICE, PINNED };
enum ghost_place ghost_place(const void *pointer);

// Maximum number of bytes that are actually copied or filled. Larger tensors do not change, so their pages never exist.
#define GHOST_SMALL (1ul << 20)
void ghost_move(void *to, const void *from, size_t bytes); // nothing if it is more

int ghost_attribute(int attribute); // of the device, by CUDA's number
extern __thread int ghost_device;
